"""Interface between the engine and the algorithm that proposes draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphkit.step.context import EngineContext
from graphkit.step.step_tensors import DraftTree, PrefillChunk, Verified

if TYPE_CHECKING:
    import torch

    from graphkit.runners import Runner


class Drafter(ABC):
    """Proposes the tokens that the target verifies. Subclass it to add a drafting algorithm.

    The engine calls ``prepare`` once, ``prefill`` for each chunk of a prompt, and in every step
    ``draft`` and then ``extend`` (v2 and v3) or ``extend_accepted`` (v1).

    ``prepare`` and ``extend_accepted`` may wait for the device. ``prefill``, ``draft`` and
    ``extend`` must only enqueue work on the current stream. A wait there does not change the output
    of v2, but removes the overlap of host and device. v3 captures ``draft`` and ``extend``, where a
    wait is a ``CaptureError``.

    The output does not depend on the proposals, greedy or sampled, unless trees have
    ``draft_probs``: see ``DraftTree``. The engine sets root tokens and positions itself. An invalid
    result of ``draft`` raises an ``InputError`` that names it.

    State that a later step needs must stay on the device. Store it per request row with
    ``context.future_map.stash`` and read it with ``resolve``.

    Requests that have ended run as pads: their row is 0 in ``draft`` and ``extend``.
    """

    runners: tuple[Runner[Any, Any], ...] = ()
    """The drafter's runners, set by ``prepare``. The engine captures and closes them."""

    host_reason: str = ""
    """Why ``draft`` or ``extend`` needs the host between steps, as a phrase; empty if they only
    enqueue work. Generation v3 is refused with this reason. Read after ``prepare``."""

    @abstractmethod
    def prepare(self, context: EngineContext) -> None:
        """Create the runners and buffers. May wait for the device.

        Raises:
            ConfigError: The context's settings do not suit this drafter.
        """

    @property
    @abstractmethod
    def max_path(self) -> int:
        """Most tokens that one verify step can accept, bonus included. Read after ``prepare``.

        A tree accepts at most its W nodes, so a larger number means W.
        """

    @property
    def slots_needed(self) -> int:
        """KV slots behind the committed tokens that ``draft`` writes. Read after ``prepare``."""
        return 0

    @abstractmethod
    def prefill(self, chunk: PrefillChunk) -> None:
        """Process a chunk of one request's prompt. Must not wait for the device.

        After the chunk with ``is_last`` set, ``draft`` is called for the request.
        """

    @abstractmethod
    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """Return a tree of W = ``context.verify_width`` nodes per request. Must not wait.

        The arguments must not be modified.

        Shapes:
            req_pool_indices: [B] int64, request rows.
            seq_lens: [B] int32, committed tokens; the position of the bonus token.
            bonus_tokens: [B] int64.
        """

    @abstractmethod
    def extend(self, verified: Verified) -> None:
        """Catch up on all W rows of every request (v2 and v3). Must not wait for the device.

        The host does not know yet which rows were accepted, nor which requests have finished.
        """

    @abstractmethod
    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """Catch up on the accepted rows of the requests that continue (v1). May wait.

        Args:
            verified: Result of the step, for all its requests.
            num_accepted_tokens: Accepted rows of each request, on the host; 0 if it has finished.
        """
