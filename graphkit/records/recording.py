"""Result of ``graphkit record``: the graphs of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.graph import GraphRecord
from graphkit.records.json_readers import InvalidValueError
from graphkit.records.json_text import Record
from graphkit.records.numbers import Count
from graphkit.records.text import count_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that captured at least one graph.

    Attributes:
        pid: Process id.
        command: Command line.
    """

    pid: Count
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRecord(Record):
    """Every CUDA graph that a program and its children captured.

    Attributes:
        command: Command line of the program.
        exit_code: Exit code of the program.
        environment: Where it ran.
        processes: Processes that captured; ``GraphRecord.process`` is an index into them.
        graphs: Graphs in order of capture, process by process.
    """

    KIND: ClassVar[str] = "recording"
    command: tuple[str, ...]
    exit_code: int
    environment: Environment
    processes: tuple[Process, ...]
    graphs: tuple[GraphRecord, ...]

    def check_contents(self) -> None:
        """Refuse graphs of a process that is not listed; called when a record is read.

        Raises:
            InvalidValueError: Names the first such graph.
        """
        for position, graph in enumerate(self.graphs):
            if graph.process >= len(self.processes):
                expected = f"the index of one of {count_of(len(self.processes), 'process')}"
                raise InvalidValueError(
                    str(graph.process), expected, ".process", f"[{position}]", ".graphs"
                )
