"""The files with which the processes of an audited program report what they found.

Each process has one file with all that it checked and found so far. A process that writes its file
also writes the report of all processes, so that this report is complete however the program ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from graphkit.audit.foreign.audit_options import REPORT_VARIABLE
from graphkit.audit.foreign.graph_files import FOLDER_VARIABLE
from graphkit.errors import ConfigError, RecordError
from graphkit.records import AuditReport

_PART, _FAULT, _LOCK, _RUN = ".json", ".fault", "lock", "run"
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


@dataclass(frozen=True, slots=True)
class Run:
    """The processes that write into one folder at the same time, or while one of them waits.

    Attributes:
        began_ns: Time at which the first one joined, as ``time.time_ns``. Files from before belong
            to an earlier run.
        command: Command line of the first one.
    """

    began_ns: int
    command: str

    @classmethod
    def joined(cls, folder: Path) -> Run:
        """Join the run of a folder until this process ends, or begin one if there is none.

        Each process holds a shared lock, which ends with it, whatever ends it. A process that gets
        the lock for itself is the first one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # Not closed: the lock belongs to the process and to its forks.
        file = os.open(folder / _RUN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = json.dumps([time.time_ns(), " ".join(sys.orig_argv)]).encode()
            os.truncate(file, os.pwrite(file, text, 0))
        fcntl.flock(file, fcntl.LOCK_SH)
        began_ns, command = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        return cls(began_ns, command)


class AuditFileWriter:
    """Writes the report of this process, and the program's report.

    Args:
        folder: The folder that all processes of the program share.
        report: File of the program's report.
        run: The run whose files count; ``None`` if the folder is new and belongs to one program.
    """

    def __init__(self, folder: Path, report: Path, run: Run | None = None) -> None:
        self._folder, self._report, self._run = folder, report, run
        self._pid, self._name, self._last = 0, "", 0.0

    @classmethod
    def from_environment(cls, report: Path) -> AuditFileWriter:
        """Return the writer of this process.

        Its folder is the one of ``graphkit record``, or else ``REPORT.processes``.

        Raises:
            ConfigError: The report cannot be written.
            FileExistsError: A file has the name of the folder.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            return cls(Path(folder), report)
        beside = report.with_name(f"{report.name}.processes")
        try:
            if report.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            run = Run.joined(beside)
        except FileExistsError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{REPORT_VARIABLE} names {report}, which cannot be written: "
                f"{getattr(error, 'strerror', None) or error}. Name a file in a folder that this "
                "process may write.",
                field=REPORT_VARIABLE,
            ) from error
        return cls(beside, report, run)

    def is_due(self) -> bool:
        """Return whether this process has no file, or some time has passed since it was written."""
        return self._pid != os.getpid() or time.monotonic() > self._last + _SECONDS

    def write(self, report: AuditReport) -> None:
        """Write what this process found, and the report of all processes."""
        self._last = time.monotonic()
        _write(self._path(_PART), report.to_json())
        with (self._folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._run is not None:
                _remove_older(self._folder, self._run.began_ns)
            command = " ".join(sys.orig_argv) if self._run is None else self._run.command
            combined = collect_audit(self._folder, command)
            # ``graphkit record`` writes to a device or a pipe once, at the end.
            if combined is not None and (self._report.is_file() or not self._report.exists()):
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


def _remove_older(folder: Path, began_ns: int) -> None:
    """Remove the files of processes that began to write before a time."""
    for path in (*folder.glob(f"*-*{_PART}"), *folder.glob(f"*-*{_FAULT}")):
        if int(path.name.partition("-")[0]) < began_ns:
            path.unlink()


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
