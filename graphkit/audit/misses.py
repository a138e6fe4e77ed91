"""Which batches would miss their graph, and which graphs no batch would ever use.

Needs no capture: a planned runner knows its sizes and its fields.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.errors import TargetError
from graphkit.graphs import SizeTable
from graphkit.runners import Decision, Reason, Runner
from graphkit.runners.dispatch import Dispatch
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.targets import CaptureTarget

_SEED = 10
_MOST_WASTE = 1 / 3
"""Share of pads that is worth a finding. Sizes that double each time stay below."""
_ADVICE = {
    Reason.WRONG_WIDTH: "Let the scheduler bring as many rows per request as the spec says.",
    Reason.FIELD_NOT_CAPTURED: "Name the field in the target's optional, or leave it out.",
    Reason.UNSUPPORTED_ATTENTION: "Use an attention backend that has graphs for the mode.",
    Reason.BAD_FIELD: "Give the field as its mode declares it; there is no eager way either.",
}


def audit_misses(
    target: CaptureTarget,
    log: AuditLog,
    *,
    modes: Sequence[ForwardMode] | None = None,
    device: str = "auto",
) -> None:
    """Check for batches without a graph and graphs without a batch, at the target's own sizes.

    Args:
        target: Its sample batches stand for what the scheduler brings.
        log: Takes what is found.
        modes: ``None`` takes all that the target has, and looks for those that it lacks.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        TargetError: The target lacks a mode.
    """
    for mode in target.forwards if modes is None else modes:
        runner = target.runner(mode, device=device)
        with log.check("misses", mode.name) as check, runner:
            _look_at_batches(target, runner, check)
    if modes is None:
        with log.check("misses") as check:
            _look_for_modes(target, check)


def _look_at_batches(target: CaptureTarget, runner: Runner[Any], check: Check) -> None:
    """Bring a batch of every live size to a planned runner."""
    dispatch = Dispatch(runner.table, runner.buffers, runner.eager_reason)
    decisions: dict[int, Decision] = {}
    for live in range(1, _most_running(runner) + 1):
        try:
            batch = target.batch(runner.mode, live, _SEED + live)
        except TargetError:  # the scheduler brings none of that size
            continue
        decisions[live] = dispatch.decide(batch, "captured")
    _tell_misses(decisions, check)
    check.text = f"{len(decisions)} live sizes, {sum(map(bool, decisions.values()))} with a graph"
    if decisions and not runner.eager_reason:
        _tell_unused(runner.table, list(decisions), check)
        _tell_waste(runner.table, list(decisions), check)


def _most_running(runner: Runner[Any]) -> int:
    """Most requests in a batch: there are no more than the request pool has rows."""
    pool = getattr(runner.attention, "req_to_token_pool", None)
    return min(runner.table.max_batch_size, getattr(pool, "size", runner.table.max_batch_size))


def _tell_misses(decisions: dict[int, Decision], check: Check) -> None:
    alike: dict[tuple[Reason | None, str], list[int]] = {}
    for live, decision in decisions.items():
        if not decision:
            reason = re.sub(r"\d+", "", decision.reason)  # numbers differ from size to size
            alike.setdefault((decision.kind, reason), []).append(live)
    for (kind, _), lives in alike.items():
        assert kind is not None, "a batch that is not replayed has a reason"
        check.report(
            "batch falls back" if kind.has_eager_way else "batch is refused",
            f"batches of {spans(lives)} requests have no graph: "
            f"{decisions[lives[0]].reason.rstrip('.')}.",
            severity="warning" if kind is Reason.UNSUPPORTED_ATTENTION else "error",
            advice=_ADVICE.get(kind, ""),
        )


def _tell_unused(table: SizeTable, lives: Sequence[int], check: Check) -> None:
    reached = {table.fit(live) for live in lives}
    for size in table:
        if size not in reached:
            check.report(
                "unreachable size",
                f"no batch runs at size {size}: there are batches of {spans(lives)} requests, and "
                f"they run at {', '.join(map(str, sorted(reached)))}.",
                batch_size=size,
                severity="warning",
                advice="Leave the size out, or let the request pool and the sample batches have "
                "as many requests as max_batch_size.",
            )


def _tell_waste(table: SizeTable, lives: Sequence[int], check: Check) -> None:
    """Pads, if every live size is as likely as any other."""
    worst = max(lives, key=lambda live: 1 - live / table.fit(live))
    share, at_worst = _waste(table, lives), 1 - worst / table.fit(worst)
    text = f"{share:.0%} of all rows are pads, {at_worst:.0%} at worst ({worst} live at size "
    text += f"{table.fit(worst)})"
    check.text += f"; {text}" if share else "; no pads"
    if share > _MOST_WASTE:
        more, best = min((_waste(table, lives, size), size) for size in lives)
        check.report(
            "padding waste",
            f"{text}.",
            severity="warning",
            advice=f"Capture {best} as well: then it is {more:.0%}.",
        )


def _waste(table: SizeTable, lives: Sequence[int], extra: int = 0) -> float:
    """The share of pads, with one more size captured if it is given."""
    padded = [extra if live <= extra < table.fit(live) else table.fit(live) for live in lives]
    return 1 - sum(lives) / sum(padded)


def _look_for_modes(target: CaptureTarget, check: Check) -> None:
    """Modes that the algorithm dispatches although the target has no forward for them."""
    for modes in _dispatched(target.spec):
        if not any(mode in target.forwards for mode in modes):
            names = " or ".join(mode.name for mode in modes)
            check.report(
                "mode without a graph",
                f"{_name_of(target.spec)} runs {names}, for which the target has no forward: it "
                "will run without a graph.",
                severity="warning",
                advice="Give the target that forward, unless another target has it.",
            )
    check.text = f"the modes of {_name_of(target.spec)}"


def _dispatched(spec: SpecConfig) -> Iterator[tuple[ForwardMode, ...]]:
    """What a step runs; any mode of each group will do."""
    algorithm = spec.resolved
    if algorithm.is_none():
        yield (ForwardMode.DECODE,)
        return
    if not spec.is_draft_worker or algorithm.supports_target_verify_for_draft():
        yield (ForwardMode.TARGET_VERIFY,)
    if spec.num_steps and (algorithm.is_eagle() or algorithm.is_standalone()):
        chain = (ForwardMode.MULTI_LAYER_EAGLE,) if algorithm.is_eagle() else ()
        yield (ForwardMode.DRAFT, *chain)
        with warnings.catch_warnings(action="ignore"):  # of falling back to v1
            is_v2 = spec.plan().generation == "v2"
        yield (ForwardMode.DRAFT_EXTEND_V2 if is_v2 else ForwardMode.DRAFT_EXTEND, *chain)


def _name_of(spec: SpecConfig) -> str:
    return str(getattr(spec.resolved, "name", type(spec.resolved).__name__))


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers for people, such as ``1 to 3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
