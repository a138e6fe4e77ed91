"""What graphkit measured and counted, as plain data with JSON both ways. Needs no torch.

Everything that people see is made from these, so it works without a GPU. A record carries its
schema version; a reader refuses a newer one instead of guessing.
"""

from graphkit.records.bench import BenchReport, Measure
from graphkit.records.capture import (
    BufferRecord,
    CaptureRecord,
    Mismatch,
    ModeRecord,
    ReplayStats,
    SizeRecord,
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
from graphkit.records.json_text import SCHEMA, Record, load_record
from graphkit.records.recording import Process, RecordingRecord

__all__ = [
    "SCHEMA",
    "Argument",
    "BenchReport",
    "BufferRecord",
    "CaptureRecord",
    "Completion",
    "Edge",
    "Environment",
    "GenerateRecord",
    "GraphMemory",
    "GraphRecord",
    "Measure",
    "Mismatch",
    "ModeRecord",
    "Node",
    "Pointer",
    "Process",
    "Record",
    "RecordingRecord",
    "ReplayStats",
    "Segment",
    "SizeRecord",
    "Timing",
    "load_record",
]
