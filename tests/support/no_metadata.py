"""An attention backend that computes nothing."""

from __future__ import annotations

from graphkit.buffers import AttentionBackend


class NoMetadata(AttentionBackend):
    """Supports every mode but ``unsupported``, and returns no metadata."""

    def __init__(self, *unsupported):
        self.unsupported = unsupported

    def supports(self, mode):
        return mode not in self.unsupported

    def init_state(self, sizes, max_tokens):
        pass

    def metadata(self, mode, inputs):
        return None
