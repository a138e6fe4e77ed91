"""The parts of a recording: written by each process as it captures, put together at the end.

A part is a file of its own that holds a recording of one graph. It has its last name only when it
is whole, so that a process may end at any moment, by a signal or ``os._exit``, and costs at most
the graph that it was writing.
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
from graphkit.records import GraphRecord, Process, RecordingRecord

FOLDER = "GRAPHKIT_RECORDING"
"""The environment variable that tells the processes of a program where their parts go."""

_BEGUN, _WHOLE = ".begun", ".json"
_TORCH = "torch"


class PartWriter:
    """Writes the graphs that this process captures.

    A forked child that goes on with the same writer counts as a process of its own.

    Args:
        folder: Of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid, self._start = 0, ""
        self._numbers = itertools.count()

    @classmethod
    def of_this_process(cls) -> PartWriter | None:
        """``None`` if it does not belong to a recorded program."""
        folder = os.environ.get(FOLDER)
        return None if folder is None else cls(Path(folder))

    def note_torch(self) -> None:
        """Say that the program imported torch."""
        (self._folder / _TORCH).touch()

    def add(self, make: Callable[[], GraphRecord]) -> None:
        """Write one graph. If ``make`` fails, or never returns, the graph counts as lost."""
        begun = self._folder / (self._next_name() + _BEGUN)
        begun.touch()
        begun.write_text(_part(make()).to_json(), encoding="utf-8")
        begun.rename(begun.with_suffix(_WHOLE))

    def _next_name(self) -> str:
        """Names sort by process, then by order; the time tells a number that came again."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._start = f"{time.time_ns()}-{self._pid}"
            self._numbers = itertools.count()
        return f"{self._start}-{next(self._numbers):06}"


def _part(graph: GraphRecord) -> RecordingRecord:
    """A recording as of now."""
    process = Process(pid=os.getpid(), command=tuple(sys.orig_argv))
    return _record(process.command, 0, [process], [graph])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What became of a recorded program.

    Attributes:
        exit_code: Its own; 128 and the signal's number if a signal ended it, as in a shell.
        record: All graphs that it captured; ``None`` if there is none.
        lost: How many graphs more could not be recorded, by process number.
        imported_torch: Whether any of its processes did.
    """

    exit_code: int
    record: RecordingRecord | None
    lost: Mapping[int, int]
    imported_torch: bool


def put_together(folder: Path, command: Sequence[str], exit_code: int) -> Recorded:
    """Read all parts of a recording; one that is cut off counts as lost."""
    processes: dict[str, Process] = {}
    graphs: list[GraphRecord] = []
    lost: Counter[int] = Counter()
    for path in sorted(folder.glob("*-*-*")):
        start = path.name.rpartition("-")[0]
        try:
            part = RecordingRecord.load(path)
        except RecordError:
            lost[int(start.rpartition("-")[2])] += 1
            continue
        processes.setdefault(start, part.processes[0])
        graphs += [replace(graph, process=len(processes) - 1) for graph in part.graphs]
    return Recorded(
        exit_code=exit_code,
        record=_record(command, exit_code, processes.values(), graphs) if graphs else None,
        lost=lost,
        imported_torch=(folder / _TORCH).exists(),
    )


def _record(
    command: Sequence[str],
    exit_code: int,
    processes: Iterable[Process],
    graphs: Sequence[GraphRecord],
) -> RecordingRecord:
    return RecordingRecord(
        command=tuple(command),
        exit_code=exit_code,
        environment=graphs[0].environment,
        processes=tuple(processes),
        graphs=tuple(graphs),
    )
