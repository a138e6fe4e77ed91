"""The audit of this process: how it begins and ends, and what a program can ask of it."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from graphkit.audit.foreign.audit_options import REPORT_VARIABLE, AuditOptions
from graphkit.audit.foreign.digest import GraphDigest, differences, digest_of_graphs
from graphkit.audit.foreign.hooks import (
    RecordedCapture,
    call_safely,
    observe_captures,
    observe_replays,
)
from graphkit.audit.foreign.process_files import AuditFileWriter, GraphFileWriter
from graphkit.errors import ConfigError, short_repr

if TYPE_CHECKING:
    from graphkit.audit.foreign.audits.program_audit import ProgramAudit
    from graphkit.records import AuditReport, Finding

_audits: list[ProgramAudit] = []
"""The audit of this process, once it has begun."""


def hook_into(graph_class: Any) -> None:
    """Audit or record the graphs of a class from now on, as the environment asks for.

    Raises:
        ConfigError: The report cannot be written.
        InspectError: This torch cannot keep a graph's template.
    """
    writer, options = GraphFileWriter.from_environment(), AuditOptions.from_environment()
    if writer is not None:
        writer.mark_torch_imported()
    if options is not None:
        _follow(graph_class, options)
    elif writer is not None:
        observe_captures(graph_class, lambda: RecordedCapture(writer))


def _follow(graph_class: Any, options: AuditOptions) -> None:
    # Absolute, for child processes with another working directory.
    os.environ[REPORT_VARIABLE] = str(options.report)
    writer = AuditFileWriter.from_environment(options.report)

    def audit() -> ProgramAudit:
        if not _audits:  # torch is imported by now
            from graphkit.audit.foreign.audits.program_audit import ProgramAudit

            begin(ProgramAudit(options, writer))
        return _audits[0]

    observe_captures(graph_class, lambda: audit().new_capture())
    observe_replays(graph_class, audit)


def begin(audit: ProgramAudit) -> None:
    """Install the audit of this process, and the checks after functions that move memory."""
    import torch

    _audits[:] = [audit]
    module = torch.nn.Module
    for owner, name in (
        (torch.cuda.memory, "empty_cache"),
        (torch.cuda, "empty_cache"),
        (module, "load_state_dict"),
        (module, "to"),
        (module, "cpu"),
        (module, "cuda"),
    ):
        setattr(owner, name, _followed_by_checks(getattr(owner, name)))
    os.register_at_fork(after_in_child=audit.forget)
    atexit.register(call_safely, audit.end)
    # A forked process of multiprocessing ends without atexit. It clears its finalizers when it
    # begins and runs those that were registered since.
    _finalize(audit)
    multiprocessing.util.register_after_fork(audit, _finalize)


def _finalize(audit: ProgramAudit) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, call_safely, (audit.end,), exitpriority=0)


def audit_graphs() -> AuditReport:
    """Check the pointers of all live foreign graphs, and return what was found so far.

    Call it after a sleep, a wake-up or an update of weights, before the next replay. Takes
    milliseconds per graph; no graph is replayed.

    Returns:
        The report of this process, one finding per cause.

    Raises:
        ConfigError: No graph is followed: the process runs neither under ``graphkit record
            --audit`` nor with ``GRAPHKIT_AUDIT``, or has captured nothing yet.
    """
    return _running().check_now()


def graph_digest() -> GraphDigest:
    """Return checksums of all live foreign graphs and of the memory that they read.

    Covers each graph's nodes and arguments, the weights and other tensors that the nodes point to,
    and the memory of its pool that held tensors at the capture. Reads all of this memory once and
    waits for the device.

    Raises:
        ConfigError: As for ``audit_graphs``.
    """
    audit = _running()
    return digest_of_graphs(audit.current_device(), audit.graphs)


def compare_digest(before: GraphDigest, after: GraphDigest | None = None) -> tuple[Finding, ...]:
    """Return a finding for all that differs from an earlier digest, errors first.

    Memory that is gone, weights and pool memory that became zero, and changed nodes are errors, and
    findings of the report as well. Other weights that differ are notes: an update changes them on
    purpose. The content of tensors and of pool memory is compared only if no graph was replayed in
    between, because replays write it.

    Args:
        before: An earlier digest of this process.
        after: A later one; ``None`` takes it now.

    Raises:
        ConfigError: As for ``audit_graphs``, or an argument is no digest.
    """
    for name, value in {"before": before, "after": after}.items():
        if not isinstance(value, GraphDigest) and (name == "before" or value is not None):
            raise ConfigError(f"{name} must be a GraphDigest, got {short_repr(value)}.", field=name)
    findings = differences(before, graph_digest() if after is None else after)
    for finding in findings:
        if finding.severity == "error" and _audits:
            _audits[0].results.add_finding(finding)
    return findings


def _running() -> ProgramAudit:
    if not _audits:
        raise ConfigError(
            "no graph of this process is followed. Run it under `graphkit record --audit` or with "
            "GRAPHKIT_AUDIT=report.json, and call this after the first capture."
        )
    return _audits[0]


def _followed_by_checks(function: Any) -> Any:
    """Return a function after which the pointers of every graph are checked at its next replay."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            for audit in _audits:
                call_safely(audit.check_next_replays)

    return call
