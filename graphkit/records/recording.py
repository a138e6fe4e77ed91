"""Result of ``graphkit record``: the graphs of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.graph import GraphRecord
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that captured at least one graph.

    Attributes:
        pid: Process id.
        command: Command line.
    """

    pid: int
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
