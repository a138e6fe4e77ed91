"""The interface of a speculative algorithm, the built-in ones, and the base for custom ones."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from graphkit.spec.future_map import FutureMap

if TYPE_CHECKING:
    import torch


class _AlgorithmInterface:
    """The methods of an algorithm that runners and engines call. All may be overridden."""

    def is_none(self) -> bool:
        """Return whether the algorithm is plain decoding."""
        return False

    def is_eagle(self) -> bool:
        """Return whether a draft head reads the target's hidden states: EAGLE and EAGLE3."""
        return False

    def is_eagle3(self) -> bool:
        """Return whether the draft head reads several target layers, as in EAGLE3."""
        return False

    def is_standalone(self) -> bool:
        """Return whether drafts come from a separate small model."""
        return False

    def is_dflash(self) -> bool:
        """Return whether the draft model fills a block in one forward."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Return whether a draft worker may capture TARGET_VERIFY."""
        return self.is_dflash()

    def get_num_tokens_per_bs_for_target_verify(
        self,
        num_draft_tokens: int,
        is_draft_worker: bool,  # noqa: ARG002 - for algorithms whose two sides differ
    ) -> int:
        """Return the rows per request in TARGET_VERIFY; by default the whole draft tree."""
        return num_draft_tokens

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: torch.device | str,
    ) -> FutureMap:
        """Create the ``FutureMap`` that keeps one step's results for the next.

        Arguments and errors are those of ``FutureMap``.
        """
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
        """Return whether this is NONE."""
        return self is SpecAlgorithm.NONE

    def is_eagle(self) -> bool:
        """Return whether this is EAGLE or EAGLE3."""
        return self in (SpecAlgorithm.EAGLE, SpecAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        """Return whether this is EAGLE3."""
        return self is SpecAlgorithm.EAGLE3

    def is_standalone(self) -> bool:
        """Return whether this is STANDALONE."""
        return self is SpecAlgorithm.STANDALONE

    def is_dflash(self) -> bool:
        """Return whether this is DFLASH."""
        return self is SpecAlgorithm.DFLASH


class CustomSpecAlgorithm(_AlgorithmInterface):
    """Base of custom algorithms; register one with ``register_algorithm(name, cls)``.

    Attributes:
        name: Name that it is registered under.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


Algorithm = SpecAlgorithm | CustomSpecAlgorithm
"""A built-in algorithm, or an instance of a registered class."""

INTERFACE = tuple(name for name in vars(_AlgorithmInterface) if not name.startswith("_"))
"""Every method that a registered class must have."""
PREDICATES = tuple(name for name in INTERFACE if name.startswith(("is_", "supports_")))
"""The methods of ``INTERFACE`` that return a bool."""
