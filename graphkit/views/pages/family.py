"""The graphs that one goes through one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from graphkit.records import CaptureRecord, ModeRecord, RecordWithGraphs
from graphkit.views.selection import Titled, titled


@dataclass(frozen=True, slots=True)
class Family:
    """The graphs of one mode, or of one process.

    Attributes:
        graphs: With their names, in the record's order.
        modes: All modes of the record, whose buffers can be shown.
    """

    graphs: tuple[Titled, ...]
    modes: tuple[ModeRecord, ...] = ()


def families(record: RecordWithGraphs) -> tuple[Family, ...]:
    """Those of a capture by mode, those of a recording by process; in the record's order."""
    is_capture = isinstance(record, CaptureRecord)
    together: dict[str | int, list[Titled]] = {}
    for title, graph in titled(record):
        key = graph.mode if is_capture else graph.process
        together.setdefault(key, []).append((title, graph))
    modes = record.modes if isinstance(record, CaptureRecord) else ()
    return tuple(Family(tuple(graphs), modes) for graphs in together.values())
