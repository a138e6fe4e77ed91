"""Measurements and counts as frozen dataclasses that JSON holds. Needs no torch.

Tables, pages and pictures are made from these alone, so they need neither a GPU nor a model. A
record carries its schema number; a reader refuses a newer one.
"""

from graphkit.records.audit import AuditCheck, AuditReport, Finding, GraphBaseline
from graphkit.records.bench import BenchReport, Measure
from graphkit.records.capture import (
    BufferRecord,
    CaptureRecord,
    LoopBody,
    LoopRecord,
    Mismatch,
    ModeRecord,
    ReplayStats,
    SizeRecord,
)
from graphkit.records.diff import (
    DiffRecord,
    FieldChange,
    GraphDiff,
    MetricChange,
    NodeChange,
    SizeDiff,
)
from graphkit.records.environment import Environment
from graphkit.records.foreign import ForeignRecord, Process
from graphkit.records.generate import Completion, GenerateRecord
from graphkit.records.graph import GraphMemory, GraphRecord, Segment, Timing
from graphkit.records.memory import MemoryEstimate, ModeMemory
from graphkit.records.node import Argument, Edge, Node, Pointer
from graphkit.records.record import SCHEMA, Record, load_record
from graphkit.records.text import (
    count_of,
    distinct_text,
    extent,
    figure_heading,
    figure_name,
    listed,
    tensor_text,
)
from graphkit.records.timeline import Gap, Timeline
from graphkit.records.with_graphs import RecordWithGraphs, require_graphs
from graphkit.records.wrapper import WrapperDifference, WrapperRecord

__all__ = [
    "SCHEMA",
    "Argument",
    "AuditCheck",
    "AuditReport",
    "BenchReport",
    "BufferRecord",
    "CaptureRecord",
    "Completion",
    "DiffRecord",
    "Edge",
    "Environment",
    "FieldChange",
    "Finding",
    "ForeignRecord",
    "Gap",
    "GenerateRecord",
    "GraphBaseline",
    "GraphDiff",
    "GraphMemory",
    "GraphRecord",
    "LoopBody",
    "LoopRecord",
    "Measure",
    "MemoryEstimate",
    "MetricChange",
    "Mismatch",
    "ModeMemory",
    "ModeRecord",
    "Node",
    "NodeChange",
    "Pointer",
    "Process",
    "Record",
    "RecordWithGraphs",
    "ReplayStats",
    "Segment",
    "SizeDiff",
    "SizeRecord",
    "Timeline",
    "Timing",
    "WrapperDifference",
    "WrapperRecord",
    "count_of",
    "distinct_text",
    "extent",
    "figure_heading",
    "figure_name",
    "listed",
    "load_record",
    "require_graphs",
    "tensor_text",
]
