"""Checks of a drafter, and checks that drafters make of their settings and inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.config import require_int
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.drafter import Drafter
from graphkit.errors import ConfigError, OutputError, short_repr
from graphkit.runners import Runner
from graphkit.spec.signatures import signature_mismatch

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
    """Check what ``prepare`` or ``at_length`` of a drafter has set, and return it.

    Raises:
        ConfigError: ``runners`` is not a tuple of runners, or a number is out of range.
    """
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

    Args:
        owner: Name of the drafter's class, for messages.
        context: The engine's.

    Raises:
        ConfigError: Verify has fewer rows than the trees have nodes, or more than a tree has.
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
    """Refuse an override of ``prefill`` that is never called.

    Raises:
        ConfigError: A base class overrides ``prefill_batch``.
    """
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
    """Return the target's hidden states.

    Args:
        owner: Name of the class of the drafter that reads them, for messages.
        hidden_states: What the target's forward returned.

    Raises:
        OutputError: It returned none.
    """
    if hidden_states is None:
        raise OutputError(
            f"the target's forward returned no hidden_states, but the draft model of {owner} reads "
            "them. Return ForwardOutput(hidden_states=...), or use an algorithm whose "
            "is_standalone() is True."
        )
    return hidden_states
