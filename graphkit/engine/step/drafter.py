"""Interface between the engine and the algorithm that proposes draft tokens, and its checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from graphkit.config import require_int
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import ChainTree, DraftTree
from graphkit.engine.step.prefill_batch import PrefillBatch, PrefillChunk
from graphkit.errors import ConfigError, OutputError, short_repr
from graphkit.runners import Runner
from graphkit.spec.signatures import signature_mismatch


class Drafter(ABC):
    """Proposes the tokens that the target verifies. Subclass it to add a drafting algorithm.

    The engine calls ``prepare`` once, ``prefill_batch`` for the chunks of prompts, which calls
    ``prefill`` for each of them unless it is overridden, and in every step
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

    eager_reason: str = ""
    """Reason why ``draft`` or ``extend`` needs the host between steps, or an empty string if they
    only enqueue work. Generation v3 is refused with this reason. Read after ``prepare``."""

    is_greedy: bool = False
    """Whether all requests of the step have temperature 0. The engine sets it before ``draft``."""

    @abstractmethod
    def prepare(self, context: EngineContext) -> None:
        """Create the runners and buffers. May wait for the device.

        Raises:
            ConfigError: The context's settings do not suit this drafter.
        """

    def at_length(self, context: EngineContext) -> Drafter:  # noqa: ARG002
        """Return a prepared drafter of another draft length, which shares the state of requests.

        Called after ``prepare`` for each further length of ``SpecConfig.lengths``. Requests change
        from one to the other between steps: ``draft`` of either continues what ``extend`` of the
        other has left. ``prefill`` is called on the first drafter alone, which has the longest
        length. By default, drafters have one length.

        Args:
            context: The engine's, with the settings of the length as its ``spec``.

        Raises:
            ConfigError: The drafter has one length, or the settings do not suit it.
        """
        raise ConfigError(
            f"SpecConfig.num_steps has several draft lengths, but {type(self).__name__} has one. "
            "Define at_length, or set num_steps to an int.",
            field="num_steps",
        )

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

    def prefill(self, chunk: PrefillChunk) -> None:  # noqa: B027 - not all drafters read prompts
        """Process a chunk of one request's prompt; by default, do nothing. Must not wait.

        After the chunk with ``is_last`` set, ``draft`` is called for the request. A prompt may
        begin again from its first chunk, also on another row.
        """

    def prefill_batch(self, batch: PrefillBatch) -> None:
        """Process the chunks of several requests. Must not wait for the device.

        Calls ``prefill`` for each chunk. Override it to run one forward for all. After an
        exception, each chunk is passed again in a batch of its own.
        """
        for chunk in batch.chunks():
            self.prefill(chunk)

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

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:
        """Catch up on the accepted rows of the requests that continue (v1). May wait.

        Calls ``extend`` with all rows, as v2 does; what it keeps of requests that have finished is
        never read. Override it to leave out rows.

        Args:
            verified: Result of the step, for all its requests.
            num_accepted_tokens: Accepted rows of each request, on the host; 0 if it has finished.
        """
        if any(num_accepted_tokens):
            self.extend(verified)


class NullDrafter(Drafter):
    """Proposes no drafts: every tree is its bonus token."""

    def prepare(self, context: EngineContext) -> None:
        """Check that verify has one row per request. See ``Drafter.prepare``."""
        if context.verify_width != 1:
            raise ConfigError(
                f"SpeculativeEngine has no drafter, but num_draft_tokens is "
                f"{context.spec.num_draft_tokens}, which verifies {context.verify_width} rows per "
                "request. Pass a drafter, or set num_draft_tokens to 1.",
                field="num_draft_tokens",
            )
        self._roots = ChainTree.one_chain(context, drafted=1)

    @property
    def max_path(self) -> int:
        """One: the bonus token."""
        return 1

    def prefill_batch(self, batch: PrefillBatch) -> None:
        """Do nothing."""

    def draft(
        self,
        req_pool_indices: torch.Tensor,  # noqa: ARG002
        seq_lens: torch.Tensor,  # noqa: ARG002
        bonus_tokens: torch.Tensor,
    ) -> DraftTree:
        """Return trees of one node, the bonus token."""
        return self._roots.of(bonus_tokens[:, None])

    def extend(self, verified: Verified) -> None:
        """Do nothing."""


_METHODS = (
    "prepare", "at_length", "prefill", "prefill_batch", "draft", "extend", "extend_accepted",
)  # fmt: skip


def prepare_drafter(drafter: object, context: EngineContext) -> Drafter:
    """Check a drafter, prepare it, and check what ``prepare`` has set.

    Raises:
        ConfigError: It is not a ``Drafter``, an override has another signature, ``runners`` is not
            a tuple of runners, or a number is out of range.
    """
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter is {short_repr(drafter)}, expected an instance of Drafter or None.",
            field="drafter",
        )
    _check_prefill(type(drafter))
    for name in _METHODS:
        if mismatch := signature_mismatch(drafter, name, Drafter):
            raise ConfigError(mismatch, field="drafter")
    drafter.prepare(context)
    return check_prepared(drafter)


def check_prepared(drafter: Drafter) -> Drafter:
    """Check what ``prepare`` or ``at_length`` of a drafter has set, and return it."""
    owner = type(drafter).__name__
    runners: object = drafter.runners
    if not isinstance(runners, Sequence) or not all(isinstance(r, Runner) for r in runners):
        raise ConfigError(
            f"{owner}.runners is {short_repr(runners)}, expected a tuple of runners. Set it in "
            "prepare.",
            field="runners",
        )
    require_int(owner, "max_path", drafter.max_path)
    require_int(owner, "slots_needed", drafter.slots_needed, least=0)
    return drafter


def check_draft_width(owner: str, context: EngineContext) -> None:
    """Check that trees of ``num_draft_tokens`` nodes fit the algorithm's verify.

    A chain may have fewer nodes than verify: the rest of the rows is then not accepted.
    """
    spec, width = context.spec, context.verify_width
    if width == spec.num_draft_tokens or (width > spec.num_draft_tokens and spec.topk == 1):
        return
    remedy = "" if width < spec.num_draft_tokens else ", or topk to 1: a chain may have fewer nodes"
    raise ConfigError(
        f"{spec.resolved!r} verifies {width} rows per request, but {owner} drafts "
        f"{spec.num_draft_tokens} nodes, SpecConfig.num_draft_tokens. Set num_draft_tokens to "
        f"{width}{remedy}.",
        field="num_draft_tokens",
    )


def _check_prefill(kind: type[Drafter]) -> None:
    """Refuse an override of ``prefill`` that is never called."""
    for base in kind.__mro__:
        if "prefill_batch" in vars(base):
            break
        if "prefill" in vars(base) and kind.prefill_batch is not Drafter.prefill_batch:
            raise ConfigError(
                f"{base.__name__}.prefill is never called, because a base class overrides "
                "prefill_batch, which receives the chunks of several requests. Override "
                "prefill_batch.",
                field="drafter",
            )


def require_hidden_states(owner: str, hidden_states: torch.Tensor | None) -> torch.Tensor:
    """Return the target's hidden states."""
    if hidden_states is None:
        raise OutputError(
            f"the target's forward returned no hidden_states, but the draft model of {owner} reads "
            "them. Return ForwardOutput(hidden_states=...), or use an algorithm whose "
            "is_standalone() is True."
        )
    return hidden_states
