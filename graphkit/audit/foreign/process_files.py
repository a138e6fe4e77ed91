"""The files through which the processes of a program hand in their graphs and their reports.

Each captured graph is one file, a complete recording of a single graph; each process has one file
with all that its audit checked and found so far. A file gets its final name only after it was
written in full: a process may end at any time, by a signal or by ``os._exit``, and loses at most
the graph that it was writing. A process that writes its report also writes that of all processes,
so that this is complete however the program ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkit.audit.foreign.audit_options import REPORT_VARIABLE
from graphkit.errors import ConfigError, RecordError
from graphkit.records import AuditReport, ForeignRecord, GraphRecord, Process

FOLDER_VARIABLE = "GRAPHKIT_RECORDING"
"""The environment variable that names the folder for these files."""
_INCOMPLETE, _COMPLETE, _FAULT = ".begun", ".json", ".fault"
_TORCH_MARKER, _LOCK, _RUN = "torch", "lock", "run"
_SECONDS = 0.5
"""Least time between two reports of a process without new findings."""


class _ProcessFiles:
    """Names the files of this process in a folder. A forked child counts as one of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid, self._name, self._numbers = 0, "", itertools.count()

    def _path(self, suffix: str, *, is_numbered: bool = False) -> Path:
        """Return the path of a file; the time in it tells apart processes of equal number."""
        if self._pid != os.getpid():
            self._pid, self._numbers = os.getpid(), itertools.count()
            self._name = f"{time.time_ns()}-{self._pid}"
        self._folder.mkdir(parents=True, exist_ok=True)
        number = f"-{next(self._numbers):06}" if is_numbered else ""
        return self._folder / (self._name + number + suffix)


class GraphFileWriter(_ProcessFiles):
    """Writes the graphs that this process captures, one file each."""

    @classmethod
    def from_environment(cls) -> GraphFileWriter | None:
        """Return this process's writer; ``None`` outside a recorded program."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return None if folder is None else cls(Path(folder))

    def mark_torch_imported(self) -> None:
        """Note that the program imported torch."""
        (self._folder / _TORCH_MARKER).touch()

    def write(self, inspect: Callable[[], GraphRecord]) -> None:
        """Write the graph that ``inspect`` returns.

        If ``inspect`` raises or never returns, the graph counts as lost.
        """
        incomplete = self._path(_INCOMPLETE, is_numbered=True)
        incomplete.touch()
        process = Process(pid=os.getpid(), command=tuple(sys.orig_argv))
        record = _record(process.command, 0, [process], [inspect()])
        incomplete.write_text(record.to_json(), encoding="utf-8")
        incomplete.rename(incomplete.with_suffix(_COMPLETE))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """The result of a recorded run.

    Attributes:
        exit_code: Exit code of the program; 128 plus the signal's number if a signal ended it, as
            in a shell.
        record: Every graph that was captured; ``None`` without any.
        lost_graphs: Number of graphs that could not be recorded, by process number.
        imported_torch: True if any process of the program imported torch.
    """

    exit_code: int
    record: ForeignRecord | None
    lost_graphs: Mapping[int, int]
    imported_torch: bool


def collect(folder: Path, command: Sequence[str], exit_code: int) -> RecordedProgram:
    """Combine all graph files of a folder; an incomplete file counts as a lost graph."""
    processes: dict[str, Process] = {}
    graphs: list[GraphRecord] = []
    lost: Counter[int] = Counter()
    for path in sorted(folder.glob("*-*-*")):
        prefix = path.name.rpartition("-")[0]
        try:
            recording = ForeignRecord.load(path)
        except RecordError:
            lost[int(prefix.rpartition("-")[2])] += 1
            continue
        processes.setdefault(prefix, recording.processes[0])
        graphs += [replace(graph, process=len(processes) - 1) for graph in recording.graphs]
    record = _record(command, exit_code, [*processes.values()], graphs) if graphs else None
    return RecordedProgram(
        exit_code=exit_code,
        record=record,
        lost_graphs=lost,
        imported_torch=(folder / _TORCH_MARKER).exists(),
    )


def _record(
    command: Sequence[str], exit_code: int, processes: list[Process], graphs: list[GraphRecord]
) -> ForeignRecord:
    return ForeignRecord(
        command=tuple(command),
        exit_code=exit_code,
        environment=graphs[0].environment,
        processes=tuple(processes),
        graphs=tuple(graphs),
    )


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


class AuditFileWriter(_ProcessFiles):
    """Writes the report of this process, and the program's report.

    Args:
        folder: The folder that all processes of the program share.
        report: File of the program's report.
        run: The run whose files count; ``None`` if the folder is new and belongs to one program.
    """

    def __init__(self, folder: Path, report: Path, run: Run | None = None) -> None:
        super().__init__(folder)
        self._report, self._run, self._last = report, run, 0.0

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
            return cls(beside, report, Run.joined(beside))
        except FileExistsError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{REPORT_VARIABLE} names {report}, which cannot be written: "
                f"{getattr(error, 'strerror', None) or error}. Name a file in a folder that this "
                "process may write.",
                field=REPORT_VARIABLE,
            ) from error

    def is_due(self) -> bool:
        """Return whether this process has no file, or some time has passed since it was written."""
        return self._pid != os.getpid() or time.monotonic() > self._last + _SECONDS

    def write(self, report: AuditReport) -> None:
        """Write what this process found, and the report of all processes."""
        self._last = time.monotonic()
        _write(self._path(_COMPLETE), report.to_json())
        with (self._folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = " ".join(sys.orig_argv)
            if self._run is not None:
                command = self._run.command
                for path in self._folder.glob("*-*.*"):
                    if int(path.name.partition("-")[0]) < self._run.began_ns:
                        path.unlink()
            combined = collect_audit(self._folder, command)
            # ``graphkit record`` writes to a device or a pipe once, at the end.
            if combined is not None and (self._report.is_file() or not self._report.exists()):
                _write(self._report, combined.to_json())

    def write_fault(self, graph: str, replay: int) -> None:
        """Write name of the graph and number of the replay in which CUDA failed."""
        _write(self._path(_FAULT), json.dumps([graph, replay]))


def collect_audit(folder: Path, command: str) -> AuditReport | None:
    """Return the reports of all processes as one, with a command line; ``None`` without any."""
    from graphkit.audit.causes import merged_by_cause

    parts: list[AuditReport] = []
    for path in sorted(folder.glob(f"*{_COMPLETE}")):
        with contextlib.suppress(RecordError):
            part, process = AuditReport.load(path), path.stem.rpartition("-")[2]
            parts.append(_named(part, process) if parts else part)
    if not parts:
        return None
    return replace(
        parts[0],
        target=command,
        checks=tuple(check for part in parts for check in part.checks),
        findings=merged_by_cause(finding for part in parts for finding in part.findings),
    )


def first_fault(folder: Path) -> tuple[str, int] | None:
    """Return graph and number of the first replay that failed in any process, if one did."""
    for path in sorted(folder.glob(f"*{_FAULT}")):
        graph, replay = json.loads(path.read_text(encoding="utf-8"))
        return graph, replay
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
    incomplete = path.with_name(f"{path.name}.{os.getpid()}{_INCOMPLETE}")
    incomplete.write_text(text, encoding="utf-8")
    incomplete.replace(path)
