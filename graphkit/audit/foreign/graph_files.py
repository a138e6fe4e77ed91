"""The files through which the processes of a recorded program hand in their graphs.

Each captured graph becomes one file, a complete recording of a single graph. A file gets its final
name only after it was written in full. A process may therefore end at any time, by a signal or by
``os._exit``, and loses at most the graph that it was writing.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkit.errors import RecordError
from graphkit.records import ForeignRecord, GraphRecord, Process

FOLDER_VARIABLE = "GRAPHKIT_RECORDING"
"""The environment variable that names the folder for these files."""

_INCOMPLETE, _COMPLETE = ".begun", ".json"
_TORCH_MARKER = "torch"


class GraphFileWriter:
    """Writes the graphs that this process captures, one file each.

    A forked child that continues with its parent's writer counts as a process of its own.

    Args:
        folder: The folder of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid, self._prefix = 0, ""
        self._numbers = itertools.count()

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
        incomplete = self._folder / (self._next_name() + _INCOMPLETE)
        incomplete.touch()
        incomplete.write_text(_recording(inspect()).to_json(), encoding="utf-8")
        incomplete.rename(incomplete.with_suffix(_COMPLETE))

    def _next_name(self) -> str:
        """Return a name that sorts by process, then by order of capture.

        The time in it tells apart two processes that had the same number.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._prefix = f"{time.time_ns()}-{self._pid}"
            self._numbers = itertools.count()
        return f"{self._prefix}-{next(self._numbers):06}"


def _recording(graph: GraphRecord) -> ForeignRecord:
    process = Process(pid=os.getpid(), command=tuple(sys.orig_argv))
    return _record(process.command, 0, [process], [graph])


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
    return RecordedProgram(
        exit_code=exit_code,
        record=_record(command, exit_code, processes.values(), graphs) if graphs else None,
        lost_graphs=lost,
        imported_torch=(folder / _TORCH_MARKER).exists(),
    )


def _record(
    command: Sequence[str],
    exit_code: int,
    processes: Iterable[Process],
    graphs: Sequence[GraphRecord],
) -> ForeignRecord:
    return ForeignRecord(
        command=tuple(command),
        exit_code=exit_code,
        environment=graphs[0].environment,
        processes=tuple(processes),
        graphs=tuple(graphs),
    )
