"""The forward modes of speculative decoding."""

from __future__ import annotations

from enum import Enum


class ForwardMode(Enum):
    """The task of one model forward in a speculative step.

    Attributes:
        DECODE: One row per request, without drafts.
        TARGET_VERIFY: The target scores the drafted tokens.
        DRAFT: The draft model proposes tokens.
        DRAFT_EXTEND: The draft model processes the accepted tokens, packed.
        DRAFT_EXTEND_V2: The draft model processes the accepted tokens at a uniform stride.
        MULTI_LAYER_EAGLE: Draft layers process the accepted tokens and draft, each over the window
            of the layer before.
        STEP: A step with inputs that the user declares; see ``StepRunner``.
        IDLE: No request in the batch; among several ranks, this one runs pads of the mode that the
            others run, see ``graphkit.RankGroup.idle``.
    """

    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    MULTI_LAYER_EAGLE = "multi_layer_eagle"
    STEP = "step"
    IDLE = "idle"

    def is_target_verify(self) -> bool:
        """Return whether this is TARGET_VERIFY."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft(self) -> bool:
        """Return whether this is DRAFT."""
        return self is ForwardMode.DRAFT

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """Return whether this is DRAFT_EXTEND or, with ``include_v2``, DRAFT_EXTEND_V2."""
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self.is_draft_extend_v2())

    def is_draft_extend_v2(self) -> bool:
        """Return whether this is DRAFT_EXTEND_V2."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_idle(self) -> bool:
        """Return whether this is IDLE."""
        return self is ForwardMode.IDLE
