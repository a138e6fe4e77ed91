"""What ``graphkit record`` saw of a program."""

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
        pid: Its number.
        command: Its words.
    """

    pid: int
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRecord(Record):
    """Every CUDA graph that a program and its children captured.

    Attributes:
        command: The program's words.
        exit_code: Its own.
        environment: Where.
        processes: Those that captured; ``GraphRecord.process`` is an index into them.
        graphs: In order of capture, process by process.
    """

    KIND: ClassVar[str] = "recording"
    command: tuple[str, ...]
    exit_code: int
    environment: Environment
    processes: tuple[Process, ...]
    graphs: tuple[GraphRecord, ...]
