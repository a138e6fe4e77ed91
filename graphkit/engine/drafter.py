"""What the engine asks of whoever proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphkit.engine.parts import DraftTree, EngineContext, Prefilled, Verified

if TYPE_CHECKING:
    import torch

    from graphkit.runners import Runner


class Drafter(ABC):
    """Proposes the tokens that the target verifies. Everything it does is enqueued; it never waits.

    Results for the next step go through the context's ``future_map`` under names of its own.
    """

    runners: tuple[Runner[Any], ...] = ()
    """Its runners, once ``prepare`` was called; the engine captures and closes them."""

    @abstractmethod
    def prepare(self, context: EngineContext) -> None:
        """Make the runners.

        Raises:
            ConfigError: The context's settings do not suit this drafter.
        """

    @property
    @abstractmethod
    def max_path(self) -> int:
        """Most tokens that one verify step can accept, bonus included. After ``prepare``."""

    @property
    def slots_needed(self) -> int:
        """KV slots behind the committed tokens that drafting writes."""
        return 0

    @abstractmethod
    def prefill(self, chunk: Prefilled) -> None:
        """Read a chunk of a prompt; after the last one, be ready to draft."""

    @abstractmethod
    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """Propose trees of W nodes; with topk 1, chains: their mask is not read.

        Shapes:
            req_pool_indices: [B] int64. seq_lens: [B] int32. bonus_tokens: [B] int64.
        """

    @abstractmethod
    def extend(self, verified: Verified) -> None:
        """v2: catch up on every row, without knowing on the host which were accepted."""

    @abstractmethod
    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """v1: catch up on the accepted rows of the requests that go on.

        Args:
            verified: All of the step's requests.
            num_accepted_tokens: How many rows each request has to catch up on; 0 if it has ended.
        """
