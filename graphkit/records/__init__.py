"""What graphkit measured and counted, as plain data with JSON both ways. Needs no torch.

Everything that people see is made from these, so it works without a GPU. A record carries its
schema version; a reader refuses a newer one instead of guessing.
"""

from graphkit.records.audit import AuditCheck, AuditReport, Finding
from graphkit.records.bench import BenchReport, Measure
from graphkit.records.capture import (
    BufferRecord,
    CaptureRecord,
    Mismatch,
    ModeRecord,
    ReplayStats,
    SizeRecord,
)
from graphkit.records.diff import (
    Change,
    DiffRecord,
    Figure,
    GraphDiff,
    NodeChange,
    SizeDiff,
    diff_graphs,
    diff_records,
)
from graphkit.records.environment import Environment
from graphkit.records.generate import Completion, GenerateRecord
from graphkit.records.graph import (
    Argument,
    Edge,
    GraphMemory,
    GraphRecord,
    Node,
    Pointer,
    Segment,
    Timing,
)
from graphkit.records.graphed import Graphed, graphed, graphs_of, title_of
from graphkit.records.json_text import SCHEMA, Record, load_record
from graphkit.records.lock import LockRecord
from graphkit.records.recording import Process, RecordingRecord

__all__ = [
    "SCHEMA",
    "Argument",
    "AuditCheck",
    "AuditReport",
    "BenchReport",
    "BufferRecord",
    "CaptureRecord",
    "Change",
    "Completion",
    "DiffRecord",
    "Edge",
    "Environment",
    "Figure",
    "Finding",
    "GenerateRecord",
    "GraphDiff",
    "GraphMemory",
    "GraphRecord",
    "Graphed",
    "LockRecord",
    "Measure",
    "Mismatch",
    "ModeRecord",
    "Node",
    "NodeChange",
    "Pointer",
    "Process",
    "Record",
    "RecordingRecord",
    "ReplayStats",
    "Segment",
    "SizeDiff",
    "SizeRecord",
    "Timing",
    "diff_graphs",
    "diff_records",
    "graphed",
    "graphs_of",
    "load_record",
    "title_of",
]
