"""Records the CUDA graphs of any Python program without changes to the program.

Every Python process of the program that imports torch calls ``graphkit.autoload``, which hooks into
``torch.cuda.CUDAGraph``. Each process writes every captured graph to a file at once; at the end the
files are combined into one record.

The program sees the same graphs as without a recording. Each graph also keeps its template, which
costs host memory. Recorded graphs are never replayed for the record, so they carry no timings.

Not recorded are child processes without the variables of this environment, or whose Python has no
graphkit, and graphs that are captured without ``torch.cuda.CUDAGraph``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkit.audit.foreign.audit_options import REPORT_VARIABLE, AuditOptions
from graphkit.audit.foreign.digest import GraphContents, GraphDigest, MemoryContents
from graphkit.audit.foreign.following import audit_graphs, compare_digest, graph_digest
from graphkit.audit.foreign.launch import run_python
from graphkit.audit.foreign.process_files import (
    GraphFileWriter,
    RecordedProgram,
    collect,
    collect_audit,
    first_fault,
)
from graphkit.audit.foreign.registration import register
from graphkit.records import AuditReport
from graphkit.records.audit import NOT_CHECKED, Audit

__all__ = [
    "AuditOptions",
    "AuditedProgram",
    "GraphContents",
    "GraphDigest",
    "GraphFileWriter",
    "MemoryContents",
    "RecordedProgram",
    "audit_graphs",
    "audit_program",
    "compare_digest",
    "graph_digest",
    "record_program",
    "register",
    "why_no_graph",
]


@dataclass(frozen=True, slots=True)
class AuditedProgram:
    """The result of an audited run.

    Attributes:
        exit_code: As in ``RecordedProgram``; of the first run if the program ran again.
        report: What was checked and found. If no graph was captured, its one check says why.
    """

    exit_code: int
    report: AuditReport


def audit_program(arguments: Sequence[str], options: AuditOptions) -> AuditedProgram:
    """Run ``python ARGUMENTS`` and audit every CUDA graph that it and its children capture.

    Results, standard streams and exit code are as under plain Python. The processes of the program
    write ``options.report`` while they run, from the first graph on. With ``find_fault`` the
    program runs once more, in new processes, if a replay fails: its nodes then run one by one.

    Raises:
        ConfigError: As for ``record_program``.
    """
    with tempfile.TemporaryDirectory("-graphkit-audit", ignore_cleanup_errors=True) as name:
        folder, command = Path(name), " ".join(arguments)
        exit_code = run_python(arguments, folder, options.environment())
        report = collect_audit(folder, command)
        fault = first_fault(folder) if options.find_fault else None
        if fault is not None:
            again = folder / "again"
            again.mkdir()
            run_python(arguments, again, replace(options, node_by_node=fault).environment())
            repeated = collect_audit(again, command)
            report = report if repeated is None else _with_node(report, repeated)
        if report is None:
            imported_torch = collect(folder, arguments, exit_code).imported_torch
            report = _without_graph(command, why_no_graph(imported_torch))
        return AuditedProgram(exit_code, report)


def why_no_graph(imported_torch: bool) -> str:
    """Return why a program captured no graph."""
    import torch

    if not imported_torch:
        return "the program did not import torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "the program captured no graph"


def _without_graph(command: str, reason: str) -> AuditReport:
    import torch

    from graphkit.audit.audit_log import AuditLog
    from graphkit.graphs import environment

    log, device = AuditLog(), "cuda" if torch.cuda.is_available() else "cpu"
    with log.check(Audit.POINTERS) as check:
        check.text = NOT_CHECKED + reason
    return log.report(command, "cuda", environment(torch.device(device)))


def _with_node(first: AuditReport | None, repeated: AuditReport) -> AuditReport:
    """Return the report of the first run, with the fault as the second run found it."""
    faults = [finding for finding in repeated.findings if finding.audit == Audit.FAULT]
    if first is None or not faults:
        return first or repeated
    others = tuple(finding for finding in first.findings if finding.audit != Audit.FAULT)
    return replace(first, findings=(*faults, *others))


def record_program(arguments: Sequence[str]) -> RecordedProgram:
    """Run ``python ARGUMENTS`` and record every CUDA graph that it and its children capture.

    Standard streams, working directory, arguments and exit code are as under plain Python.

    Raises:
        ConfigError: graphkit is not installed here, so that torch would not find its entry point.
    """
    # A child process that outlives the program may still write while the folder is removed.
    with tempfile.TemporaryDirectory("-graphkit-record", ignore_cleanup_errors=True) as folder:
        exit_code = run_python(arguments, Path(folder), {REPORT_VARIABLE: ""})
        return collect(Path(folder), arguments, exit_code)
