"""Run all audits of a target, and write its lock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.baseline import LockedGraphs, check_baseline
from graphkit.audit.dispatch import audit_dispatch
from graphkit.audit.forward import audit_forward
from graphkit.audit.frozen_values.audit import audit_frozen_values
from graphkit.audit.launch import audit_launch, audit_streams
from graphkit.audit.loop import check_loop
from graphkit.audit.pads.audit import audit_pads
from graphkit.audit.pointers import audit_pointers
from graphkit.audit.ranks import NOT_ON_RANKS
from graphkit.audit.rows.audit import audit_rows
from graphkit.audit.runs.engine_step import LOOP_STEPS, open_step
from graphkit.audit.shadow.watch import audit_shadow
from graphkit.audit.stale_memory.runner_graph import audit_stale_memory
from graphkit.audit.undeclared_state import declare_for_audits
from graphkit.audit.warmup import audit_warmup, report_side_outputs
from graphkit.audit.wrong_outputs import audit_finite, audit_wrapper
from graphkit.config import require_type
from graphkit.errors import ConfigError, TargetError, short_repr
from graphkit.graphs import Attribution, SizeTable, backend_for, environment
from graphkit.records import AuditReport, GraphBaseline
from graphkit.records.audit import AUDITS, USUAL_AUDITS, Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import check_tolerance
from graphkit.runners.targets import CaptureTarget, selected_modes
from graphkit.spec import ForwardMode

_ONE_FORWARD = "STEP is the whole step of the engine; its forwards are audited in their own modes"
RunnerAudit = Callable[[CaptureTarget, Runner[Any, Any], AuditLog], None]
"""An audit of one mode: gets the target, which draws the batches and declares memory, a runner of
it, and the log for what it finds. Nothing else may be replayed meanwhile. Every audit restores
declared state, random numbers and what the forward holds on the host."""

BEFORE_CAPTURE: dict[Audit, RunnerAudit] = {
    Audit.WARMUP: audit_warmup,
    Audit.FROZEN: audit_frozen_values,
}
"""Audits of a planned runner, by name. ``warmup`` must see the first capture of a forward."""
AFTER_CAPTURE: dict[Audit, RunnerAudit] = {
    Audit.FORWARD: audit_forward,
    Audit.POINTERS: audit_pointers,
    Audit.POOL_POISON: audit_stale_memory,
    Audit.FINITE: audit_finite,
    Audit.PADS: audit_pads,
    Audit.SHADOW: audit_shadow,
    Audit.LAUNCH: audit_launch,
}
"""Audits of a captured runner, by name."""
BY_NAME: dict[Audit, RunnerAudit] = {Audit.ROWS: audit_rows}
"""Audits of a captured runner that run only if they are named."""


def audit_target(
    target: CaptureTarget,
    *,
    only: Collection[str] | None = None,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
    lock: GraphBaseline | None = None,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _task: None,
) -> AuditReport:
    """Audit every mode of a target.

    If the target has a ``group``, all ranks call it alike, and audits that cannot run on several
    ranks are logged as not run. Each rank returns its own report; see ``merged_reports``.

    Args:
        target: The target.
        only: Names of audits to run; ``None`` runs all of ``AUDITS`` but ``rows``.
        modes: Modes to audit; ``None`` audits all modes of the target.
        batch_sizes: Sizes to capture; ``None`` captures the smallest, a middle one and the largest.
        device: ``auto``, ``cpu`` or ``cuda``.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
        lock: Lock to compare the graphs with, from ``graph_baseline``.
        progress: Called with the number of finished steps, of all steps, and the current task.

    Returns:
        The checks, and one finding per cause.

    Raises:
        CaptureError: A forward cannot be captured.
        ConfigError: ``only`` has an unknown name, the tolerance is not above 0, or ``lock`` is no
            lock.
        TargetError: ``target`` is not a target, or lacks a mode.
    """
    chosen = _chosen(only)
    check_tolerance(tolerance)
    log = AuditLog(tolerance)
    all_modes = selected_modes(target, modes)
    require_type("audit_target", "lock", lock, (GraphBaseline, NoneType), "a GraphBaseline or None")
    backend = backend_for(device, None)
    here = environment(backend.device)
    graphs = None if lock is None else LockedGraphs(target)
    sizes = batch_sizes or representative_sizes(target)
    for done, mode in enumerate(all_modes):
        progress(done, len(all_modes), f"auditing {mode.name}")
        _audit_mode(target, mode, log, chosen, sizes, device, graphs)
    if Audit.LOOP in chosen and modes is None and target.engine is None:
        log.skip(Audit.LOOP, "", "the target declares no engine, so that there is no loop")
    if Audit.MISSES in chosen:
        audit_dispatch(target, log, modes=modes, device=device)
    if Audit.WRAPPER in chosen:
        audit_wrapper(target, log, device=device)
    if Audit.LAUNCH in chosen:
        audit_streams(backend.device, log)
    progress(len(all_modes), len(all_modes), "audited")
    if lock is not None and graphs is not None:
        names = {mode.name for mode in modes or ()}
        locked = tuple(graph for graph in lock.graphs if not names or graph.mode in names)
        check_baseline(replace(lock, graphs=locked), graphs.baseline(here), log)
    return log.report(target.name, backend.name, here)


def graph_baseline(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
) -> GraphBaseline:
    """Return a lock of a target's graphs; arguments as for ``audit_target``.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: The target lacks a mode, or has no graph.
    """
    locked = LockedGraphs(target)
    for mode in selected_modes(target, modes):
        sizes = batch_sizes or representative_sizes(target)
        _audit_mode(target, mode, AuditLog(), (), sizes, device, locked)
    if not locked.graphs:
        raise TargetError(
            f"target {short_repr(target.name)} has no graph to lock: its modes run eagerly."
        )
    return locked.baseline(locked.graphs[0].environment)


def representative_sizes(target: CaptureTarget) -> list[int]:
    """Return the smallest, a middle and the largest size of a target, to represent all."""
    table = SizeTable(target.sizes.max_batch_size, target.batch_sizes)
    return sorted({table.sizes[0], table.fit(max(table.largest // 8, 1)), table.largest})


def _chosen(only: Collection[str] | None) -> Collection[Audit]:
    expected = "names of audits, or None"
    require_type("audit_target", "only", only, (Collection, NoneType), expected)
    names: list[Any] = [] if only is None else list(only)
    unknown = [name for name in names if not isinstance(name, str) or name not in AUDITS]
    if unknown:
        raise ConfigError(
            f"unknown audit {short_repr(unknown[0])}; audits are {', '.join(AUDITS)}.", field="only"
        )
    return USUAL_AUDITS if only is None else [Audit(name) for name in only]


def _audit_mode(
    target: CaptureTarget,
    mode: ForwardMode,
    log: AuditLog,
    chosen: Collection[Audit],
    batch_sizes: Sequence[int],
    device: str,
    locked: LockedGraphs | None,
) -> None:
    """Audit a mode, and add its graphs to a lock if there is one."""
    if mode not in target.forwards:
        _audit_step(target, log, chosen, batch_sizes, device, locked)
        return
    # Audits feed NaN and stale rows on purpose, which the checking mode refuses.
    with target.runner(mode, batch_sizes=batch_sizes, device=device, check=False) as runner:
        for name, audit in BEFORE_CAPTURE.items():
            if name in chosen and not runner.eager_reason:
                audit(target, runner, log)
        runner.capture(attribution=Attribution(target.weights))
        on_graphs = () if runner.eager_reason else chosen
        if not {Audit.WARMUP, *AFTER_CAPTURE, *BY_NAME}.isdisjoint(on_graphs):
            declare_for_audits(target, runner, log)
        if Audit.WARMUP in on_graphs:
            report_side_outputs(target, runner, log)
        for name, audit in (AFTER_CAPTURE | BY_NAME).items():
            if name not in on_graphs:
                continue
            if target.group is not None and name in NOT_ON_RANKS:
                log.skip(name, mode.name, NOT_ON_RANKS[name])
            else:
                audit(target, runner, log)
        if locked is not None:
            locked.add(runner)


def _audit_step(
    target: CaptureTarget,
    log: AuditLog,
    chosen: Collection[Audit],
    batch_sizes: Sequence[int],
    device: str,
    locked: LockedGraphs | None,
) -> None:
    """Audit the whole step of a target's engine as ``_audit_mode`` does a mode.

    All audits but ``loop`` work on single forwards, and log that they were not run.
    """
    mode, runs_loop = ForwardMode.STEP.name, Audit.LOOP in chosen
    for audit in chosen:
        if audit is not Audit.LOOP:
            log.skip(audit, mode, _ONE_FORWARD)
    if runs_loop and target.group is not None:
        log.skip(Audit.LOOP, mode, NOT_ON_RANKS[Audit.LOOP])
        runs_loop = False
    if locked is None and not runs_loop:
        return
    with open_step(target, batch_sizes=batch_sizes, device=device) as step:
        if step.eager_reason:
            log.skip(Audit.LOOP, mode, step.eager_reason)
            return
        step.capture()
        if runs_loop:
            check_loop(step.runs(is_staggered=True), LOOP_STEPS, log)
        if locked is not None:
            locked.add(step.runner)
