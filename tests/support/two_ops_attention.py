"""An attention that rotates heads and stores them by two ops."""

from __future__ import annotations

from graphkit.engine.attention import TritonAttention


class TwoOps(TritonAttention):
    """Has an ``attend`` of its own, which takes rotated heads."""

    def attend(self, *args, **options):
        return super().attend(*args, **options)
