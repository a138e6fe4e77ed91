"""Record of a foreign program: the graphs that it captured under ``graphkit record``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.errors import RecordError
from graphkit.records.capture import CaptureRecord
from graphkit.records.graph import GraphRecord, check_graphs
from graphkit.records.record import Count, Environment, Integer, Record
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
class ForeignRecord(Record):
    """Every CUDA graph that a foreign program and its children captured.

    Attributes:
        command: Command line of the program.
        exit_code: Exit code of the program.
        environment: Where it ran.
        processes: Processes that captured; ``GraphRecord.process`` is an index into them.
        graphs: Graphs in order of capture, process by process.
    """

    KIND: ClassVar[str] = "recording"
    command: tuple[str, ...]
    exit_code: Integer
    environment: Environment
    processes: tuple[Process, ...]
    graphs: tuple[GraphRecord, ...]

    @property
    def title(self) -> str:
        """The command."""
        return " ".join(self.command)

    @property
    def backend(self) -> str:
        """``cuda``: programs are recorded on CUDA alone."""
        return "cuda"

    def check_contents(self) -> None:
        """Refuse invalid graphs and graphs of a process that is not listed."""
        check_graphs(self.graphs)
        for position, graph in enumerate(self.graphs):
            if graph.process >= len(self.processes):
                raise RecordError(
                    f"graphs[{position}].process is {graph.process}; expected the index of one of "
                    f"{count_of(len(self.processes), 'process')}"
                )


RecordWithGraphs = CaptureRecord | ForeignRecord | GraphRecord
"""Record that may contain graphs with their nodes."""


def require_graphs(record: Record) -> RecordWithGraphs:
    """Return the record if it is of a kind that holds graphs.

    Raises:
        RecordError: It is of a different kind.
    """
    if isinstance(record, RecordWithGraphs):
        return record
    raise RecordError(
        f"a record of kind {record.KIND!r} holds no graphs to show or compare. "
        "Give a record of kind 'capture', 'recording' or 'graph'."
    )
