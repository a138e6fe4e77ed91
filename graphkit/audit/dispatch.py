"""Find batches without a graph, and graphs without a batch.

Needs no capture: a planned runner knows its sizes and fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, requests_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.config import is_int
from graphkit.errors import TargetError
from graphkit.graphs import SizeTable
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Decision, Reason, Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.dispatch import Dispatch
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode, SpecConfig

_MAX_PAD_SHARE = 1 / 3
"""Share of pad rows above which the audit reports it; sizes that double each time stay below."""
_ADVICE = {
    Reason.WRONG_WIDTH: "Schedule as many rows per request as the SpecConfig says.",
    Reason.FIELD_NOT_CAPTURED: "Add the field to the target's optional_fields, or leave it out of "
    "batches.",
    Reason.UNSUPPORTED_ATTENTION: "Use an attention backend that supports graphs for the mode.",
    Reason.BAD_FIELD: "Pass the field as its mode declares it; the eager path refuses it too.",
}


def audit_dispatch(
    target: CaptureTarget,
    log: AuditLog,
    *,
    modes: Sequence[ForwardMode] | None = None,
    device: str = "auto",
) -> None:
    """Report batches without a graph and graphs without a batch, at the target's own sizes.

    Args:
        target: Its sample batches represent what the scheduler forms.
        log: Collects the findings.
        modes: Modes to check; ``None`` checks all of the target, and reports those without a
            forward that it serves, or that its algorithm runs.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        TargetError: The target lacks a mode.
    """
    for mode in target.forwards if modes is None else modes:
        if mode is ForwardMode.STEP and target.engine is not None:
            continue  # its batches come from the engine
        runner = target.runner(mode, device=device)
        with log.check(Audit.MISSES, mode.name) as check, runner:
            _check_batches(target, runner, check)
    if modes is None:
        with log.check(Audit.MISSES) as check:
            _check_modes(target, check)


def _check_batches(target: CaptureTarget, runner: Runner[Any, Any], check: Check) -> None:
    """Dispatch a sample batch of every batch size."""
    dispatch = Dispatch(runner.table, runner.buffers, runner.inputs_type, runner.eager_reason)
    decisions: dict[int, Decision] = {}
    for batch_size in range(1, _max_running(runner) + 1):
        try:
            batch = target.batch(runner.mode, batch_size, SEED + batch_size)
        except TargetError:  # the scheduler forms no batch of this size
            continue
        decisions[batch_size] = dispatch.decide(batch, "captured")
    is_served = target.served_modes is None or runner.mode in target.served_modes
    _report_misses(decisions, check, "warning" if is_served else "note")
    replayed = sum(map(bool, decisions.values()))
    check.text = f"{replayed} of {count_of(len(decisions), 'batch size')} with a graph"
    if decisions and not runner.eager_reason:
        _report_unused_sizes(runner.table, list(decisions), check)
        _report_pads(runner.table, list(decisions), check)


def _max_running(runner: Runner[Any, Any]) -> int:
    """Return the most requests of a batch, which the rows of the request pool limit."""
    most = runner.table.max_batch_size
    rows: object = getattr(getattr(runner.attention, "req_to_token_pool", None), "size", None)
    return min(most, rows) if is_int(rows) else most


def _report_misses(decisions: dict[int, Decision], check: Check, severity: str) -> None:
    groups: dict[tuple[Reason | None, str], list[int]] = {}
    for batch_size, decision in decisions.items():
        if not decision:
            reason = re.sub(r"\d+", "", decision.reason)  # numbers differ from size to size
            groups.setdefault((decision.kind, reason), []).append(batch_size)
    for (kind, _), batch_sizes in groups.items():
        assert kind is not None, "a batch that is not replayed has a reason"
        check.report(
            FindingKind.BATCH_FALLS_BACK if kind.has_eager_way else FindingKind.BATCH_IS_REFUSED,
            f"batches of {requests_text(batch_sizes)} have no graph: "
            f"{decisions[batch_sizes[0]].reason.rstrip('.')}.",
            severity=severity if kind.has_eager_way else "error",
            advice=_ADVICE.get(kind, ""),
        )


def _report_unused_sizes(table: SizeTable, batch_sizes: Sequence[int], check: Check) -> None:
    used = {table.fit(batch_size) for batch_size in batch_sizes}
    for size in table:
        if size not in used:
            check.report(
                FindingKind.UNREACHABLE_SIZE,
                f"no batch replays size {size}: batches of {requests_text(batch_sizes)} replay "
                f"size{'s' if len(used) > 1 else ''} {', '.join(map(str, sorted(used)))}.",
                batch_size=size,
            )


def _report_pads(table: SizeTable, batch_sizes: Sequence[int], check: Check) -> None:
    """Report the share of pad rows, over batches of each size once."""
    worst = max(batch_sizes, key=lambda batch_size: 1 - batch_size / table.fit(batch_size))
    share, at_worst = _pad_share(table, batch_sizes), 1 - worst / table.fit(worst)
    text = f"{share:.0%} of rows are pads, at most {at_worst:.0%} "
    text += f"({count_of(worst, 'request')} at size {table.fit(worst)})"
    check.text += f"; {text}" if share else "; no pads"
    if share > _MAX_PAD_SHARE:
        less, best = min((_pad_share(table, batch_sizes, size), size) for size in batch_sizes)
        check.report(
            FindingKind.PADDING_WASTE,
            f"{text}.",
            advice=f"Capture size {best} too: then {less:.0%} of rows are pads.",
        )


def _pad_share(table: SizeTable, batch_sizes: Sequence[int], extra: int = 0) -> float:
    """Return the share of pad rows, optionally with one more captured size."""
    padded = [extra if n <= extra < table.fit(n) else table.fit(n) for n in batch_sizes]
    return 1 - sum(batch_sizes) / sum(padded)


def _check_modes(target: CaptureTarget, check: Check) -> None:
    """Report modes that run without a graph because the target has no forward for them."""
    resolved, served = target.spec.resolved, target.served_modes
    algorithm = str(getattr(resolved, "name", type(resolved).__name__))
    check.text = "modes that the target serves" if served else f"modes that {algorithm} runs"
    wanted = _step_modes(target.spec) if served is None else ((mode,) for mode in served)
    missing = [
        " or ".join(mode.name for mode in modes)
        for modes in wanted
        if not any(mode in target.forwards for mode in modes)
    ]
    if missing and served is None:
        check.report(
            FindingKind.MODE_WITHOUT_A_GRAPH,
            f"{algorithm} also runs {' and '.join(missing)}, and the target has no forward for it.",
            severity="note",
            advice="Add the forward, or list the modes that the target serves in served_modes.",
        )
    elif missing:
        check.report(
            FindingKind.MODE_WITHOUT_A_GRAPH,
            f"the target serves {' and '.join(missing)}, but has no forward for it.",
        )


def _step_modes(spec: SpecConfig) -> Iterator[tuple[ForwardMode, ...]]:
    """Yield the modes that a step runs; of each tuple, any one is enough."""
    algorithm = spec.resolved
    if algorithm.is_none():
        yield (ForwardMode.DECODE,)
        return
    if not spec.is_draft_worker or algorithm.supports_target_verify_for_draft():
        yield (ForwardMode.TARGET_VERIFY,)
    if spec.longest.num_steps and (algorithm.is_eagle() or algorithm.is_standalone()):
        chain = (ForwardMode.MULTI_LAYER_EAGLE,) if algorithm.is_eagle() else ()
        yield (ForwardMode.DRAFT, *chain)
        yield (ForwardMode.DRAFT_EXTEND_V2, *chain)
