"""The files through which the processes of an audited program hand in their reports.

Each process has one file with all that it checked and found so far. Whoever writes one also writes
the report of all processes, so that it is complete however the program ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from graphkit.errors import RecordError
from graphkit.records import AuditReport

_PART, _FAULT, _LOCK = ".audit", ".fault", "lock"
_SECONDS = 0.5
"""Least time between two files of a process without new findings."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The replay in which CUDA failed.

    Attributes:
        graph: Name of the graph.
        replay: Number of the replay.
    """

    graph: str
    replay: int


class AuditFileWriter:
    """Writes the report of this process, and that of the program.

    Args:
        folder: The folder that all processes of the program share.
        report: File of the program's report.
    """

    def __init__(self, folder: Path, report: Path) -> None:
        self._folder, self._report = folder, report
        self._pid, self._name, self._last = 0, "", 0.0

    def is_due(self) -> bool:
        """Return whether some time has passed since the last file."""
        return time.monotonic() > self._last + _SECONDS

    def write(self, report: AuditReport) -> None:
        """Write what this process found, and the report of all processes."""
        self._last = time.monotonic()
        _write(self._path(_PART), report.to_json())
        with (self._folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            combined = collect_audit(self._folder, " ".join(sys.orig_argv))
            if combined is not None:
                _write(self._report, combined.to_json())

    def write_fault(self, graph: str, replay: int) -> None:
        """Write which replay failed."""
        _write(self._path(_FAULT), json.dumps([graph, replay]))

    def _path(self, suffix: str) -> Path:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._name = f"{time.time_ns()}-{self._pid}"
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / (self._name + suffix)


def collect_audit(folder: Path, command: str) -> AuditReport | None:
    """Return the reports of all processes as one; ``None`` without any.

    Args:
        folder: The folder of the program.
        command: Its command line, for the report.
    """
    from graphkit.audit.causes import merged_by_cause

    parts: list[AuditReport] = []
    for path in sorted(folder.glob(f"*{_PART}")):
        try:
            part = AuditReport.load(path)
        except RecordError:
            continue
        process = path.stem.rpartition("-")[2]
        parts.append(part if not parts else _named(part, process))
    if not parts:
        return None
    return replace(
        parts[0],
        target=command,
        checks=tuple(check for part in parts for check in part.checks),
        findings=merged_by_cause(finding for part in parts for finding in part.findings),
    )


def found_fault(folder: Path) -> Fault | None:
    """Return the first replay that failed in any process, if one did."""
    for path in sorted(folder.glob(f"*{_FAULT}")):
        graph, replay = json.loads(path.read_text(encoding="utf-8"))
        return Fault(graph, replay)
    return None


def _named(part: AuditReport, process: str) -> AuditReport:
    """Return the report of a further process, whose graphs are named with its number."""

    def named(mode: str) -> str:
        return f"process {process}: {mode}" if mode else f"process {process}"

    return replace(
        part,
        checks=tuple(replace(check, mode=named(check.mode)) for check in part.checks),
        findings=tuple(replace(finding, mode=named(finding.mode)) for finding in part.findings),
    )


def _write(path: Path, text: str) -> None:
    incomplete = path.with_name(f"{path.name}.{os.getpid()}.begun")
    incomplete.write_text(text, encoding="utf-8")
    incomplete.replace(path)
