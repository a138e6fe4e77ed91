"""Diagnosis of a wrong replay by further runs of its batch."""

from __future__ import annotations

from typing import Any

from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.runs import EqualStateRuns
from graphkit.audit.undeclared_state import undeclared_state
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import Tensors, even_owner, first_difference

_ROUNDING_IN_GRAPH = (
    "rounding, or a frozen value. The graph differs by no more than kernels that add in another "
    "order. `graphkit audit --only frozen,shadow` names the node that differs."
)


def probable_bug(runner: Runner[Any, Any], batch: Any, size: int, *, is_padding: bool) -> str:
    """Return the probable kind of finding, where it begins, and advice.

    Restores state and random numbers.

    Args:
        runner: Captured.
        batch: A batch whose replay is wrong.
        size: The captured size.
        is_padding: Whether padding changed live rows; if not, the graph differs.
    """
    undeclared, _ = undeclared_state(runner, batch) if runner.group is None else ({}, [])
    if undeclared:
        kind = FindingKind.UNDECLARED_STATE
        return f"{kind}. A replay changes {_quoted(undeclared)}. {kind.advice}"
    rounding = Rounding(runner.sizes.dtype)

    def differ(one: Tensors, other: Tensors, allowed: float = 0.0) -> bool:
        return first_difference(one, other, even_owner(1), rounding, allowed) is not None

    with EqualStateRuns(runner, batch, size) as runs:
        padded, replayed = runs.padded(), runs.replay()
        if differ(padded, runs.padded()) or differ(replayed, runs.replay()):
            return _text(Cause(FindingKind.NONDETERMINISTIC_STEP, runs.first_unstable_node()))
        if not is_padding:
            is_large = differ(padded, replayed, rounding.most)
            return frozen_value("frozen,pointers", "node") if is_large else _ROUNDING_IN_GRAPH
        return _text(padding_cause(runs))


def frozen_value(audits: str, found: str) -> str:
    """Return why a graph differs from the same step without it, and which audits find what."""
    return (
        f"{FindingKind.FROZEN_VALUE}. The graph kept a host value of its capture, or reads memory "
        f"that was replaced since. `graphkit audit --only {audits}` names the {found}."
    )


def _text(cause: Cause) -> str:
    place = f"\n  at: {cause.place}" if cause.place else ""
    return f"{cause.kind}.{cause.text} {cause.kind.advice}{place}"


def _quoted(names: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)
