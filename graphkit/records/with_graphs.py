"""Records of all kinds that hold graphs."""

from __future__ import annotations

from graphkit.errors import RecordError
from graphkit.records.capture import CaptureRecord
from graphkit.records.foreign import ForeignRecord
from graphkit.records.graph import GraphRecord
from graphkit.records.record import Record

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
