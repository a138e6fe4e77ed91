"""The records that hold graphs, whatever their kind."""

from __future__ import annotations

from graphkit.errors import RecordError
from graphkit.records.capture import CaptureRecord
from graphkit.records.graph import GraphRecord
from graphkit.records.json_text import Record
from graphkit.records.recording import RecordingRecord

Graphed = CaptureRecord | RecordingRecord | GraphRecord


def graphed(record: Record) -> Graphed:
    """The same record, known to be of a kind that holds graphs.

    Raises:
        RecordError: It is of another kind.
    """
    if isinstance(record, Graphed):
        return record
    raise RecordError(
        f"cannot compare or draw the graphs of a record of kind {record.KIND!r}: "
        "capture, recording and graph are the kinds that hold them. Give one of those."
    )


def graphs_of(record: Graphed) -> tuple[GraphRecord, ...]:
    """Its graphs; a graph is its own only one."""
    return (record,) if isinstance(record, GraphRecord) else record.graphs


def title_of(record: Graphed) -> str:
    """What it is of: a target, a command or a graph."""
    if isinstance(record, CaptureRecord):
        return record.target
    return record.name if isinstance(record, GraphRecord) else " ".join(record.command)


def backend_of(record: Graphed) -> str:
    """``cuda`` or ``recorder``; programs are recorded on CUDA alone."""
    return "cuda" if isinstance(record, RecordingRecord) else record.backend
