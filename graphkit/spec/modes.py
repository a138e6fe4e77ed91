"""The forward modes of speculative decoding."""

from __future__ import annotations

from enum import Enum


class ForwardMode(Enum):
    """What one forward of a model does in a speculative step."""

    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    MULTI_LAYER_EAGLE = "multi_layer_eagle"
    STEP = "step"
    IDLE = "idle"

    def is_decode(self) -> bool:
        """One row per request."""
        return self is ForwardMode.DECODE

    def is_target_verify(self) -> bool:
        """The target scores the drafted tokens."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft(self) -> bool:
        """The draft model proposes tokens."""
        return self is ForwardMode.DRAFT

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """The draft model catches up on accepted tokens; v2 only if ``include_v2``."""
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self.is_draft_extend_v2())

    def is_draft_extend_v2(self) -> bool:
        """The draft model catches up at a uniform stride."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_multi_layer_eagle(self) -> bool:
        """A chain of draft layers catches up and drafts, each over the window of the one before."""
        return self is ForwardMode.MULTI_LAYER_EAGLE

    def is_idle(self) -> bool:
        """No request in the batch."""
        return self is ForwardMode.IDLE
