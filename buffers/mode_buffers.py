"""Input buffers of each mode."""

from __future__ import annotations

from typing import Any

from graphkit.buffers.draft_inputs import (
    DraftExtendInputs,
    DraftInputs,
    MultiLayerDraftExtendInputs,
)
from graphkit.buffers.input_buffers import InputBuffers
from graphkit.buffers.inputs import TargetVerifyInputs


class TargetVerifyInputBuffers(InputBuffers):
    """Buffers of ``TargetVerifyInputs``."""

    inputs_type = TargetVerifyInputs


class DraftInputBuffers(InputBuffers):
    """Buffers of ``DraftInputs``."""

    inputs_type = DraftInputs


class DraftExtendInputBuffers(InputBuffers):
    """Buffers of ``DraftExtendInputs``, for v1 and v2."""

    inputs_type = DraftExtendInputs


class MultiLayerDraftExtendInputBuffers(InputBuffers):
    """Buffers of ``MultiLayerDraftExtendInputs``. All layers share them."""

    inputs_type = MultiLayerDraftExtendInputs

    def check(self, batch: Any, tokens: int, width: int | None = None) -> None:
        """See ``InputBuffers.check``. A prefill has no front tokens."""
        super().check(batch, tokens, width)
        front = self.capacity.front_tokens
        if width is None or not front:
            rows = self.capacity.tokens_per_request if width is None else width
            MultiLayerDraftExtendInputs.check_selection(batch, rows, front)
