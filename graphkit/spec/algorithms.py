"""The interface of a speculative algorithm, the built-in ones, and the base for custom ones."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from graphkit.spec.future_map import FutureMap

if TYPE_CHECKING:
    import torch


class _AlgorithmInterface:
    """What runners and engines ask of an algorithm. Everything here may be overridden."""

    def is_none(self) -> bool:
        """Plain decoding."""
        return False

    def is_some(self) -> bool:
        """Any speculation at all."""
        return not self.is_none()

    def is_eagle(self) -> bool:
        """A draft head over the target's hidden states: EAGLE and EAGLE3."""
        return False

    def is_eagle3(self) -> bool:
        """EAGLE3: the head is fed by several target layers."""
        return False

    def is_standalone(self) -> bool:
        """A separate small draft model without the target's hidden states."""
        return False

    def is_ngram(self) -> bool:
        """Drafts looked up in the text so far."""
        return False

    def is_dflash(self) -> bool:
        """A draft model that fills a whole block in one forward."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Whether a draft worker may capture TARGET_VERIFY."""
        return self.is_dflash()

    def get_num_tokens_per_bs_for_target_verify(
        self,
        num_draft_tokens: int,
        is_draft_worker: bool,  # noqa: ARG002 - for algorithms whose two sides differ
    ) -> int:
        """Rows per request in TARGET_VERIFY; the whole draft tree unless overridden."""
        return num_draft_tokens

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: torch.device | str,
    ) -> FutureMap:
        """Where one step leaves its results for the next; see ``FutureMap``."""
        return FutureMap(max_running_requests, chunked_prefill_size, context_len, device, self)


class SpecAlgorithm(_AlgorithmInterface, Enum):
    """The algorithms that graphkit knows by name."""

    NONE = "NONE"
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    DFLASH = "DFLASH"

    def is_none(self) -> bool:
        """Plain decoding."""
        return self is SpecAlgorithm.NONE

    def is_eagle(self) -> bool:
        """EAGLE or EAGLE3."""
        return self in (SpecAlgorithm.EAGLE, SpecAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        """EAGLE3 only."""
        return self is SpecAlgorithm.EAGLE3

    def is_standalone(self) -> bool:
        """STANDALONE only."""
        return self is SpecAlgorithm.STANDALONE

    def is_ngram(self) -> bool:
        """NGRAM only."""
        return self is SpecAlgorithm.NGRAM

    def is_dflash(self) -> bool:
        """DFLASH only."""
        return self is SpecAlgorithm.DFLASH


class CustomSpecAlgorithm(_AlgorithmInterface):
    """Base for an algorithm of your own; register it with ``register_algorithm(name, cls)``.

    Attributes:
        name: The name that it was made under.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


Algorithm = SpecAlgorithm | CustomSpecAlgorithm

INTERFACE = tuple(name for name in vars(_AlgorithmInterface) if not name.startswith("_"))
"""Every method that a registered class must have."""
