from graphkit.records.audit import (
    AuditCheck as AuditCheck,
    AuditReport as AuditReport,
    Finding as Finding,
    GraphBaseline as GraphBaseline,
)
from graphkit.records.bench import BenchReport as BenchReport, Measure as Measure
from graphkit.records.capture import (
    BufferRecord as BufferRecord,
    CaptureRecord as CaptureRecord,
    LoopBody as LoopBody,
    LoopRecord as LoopRecord,
    Mismatch as Mismatch,
    ModeRecord as ModeRecord,
    ReplayStats as ReplayStats,
    SizeRecord as SizeRecord,
)
from graphkit.records.diff import (
    DiffRecord as DiffRecord,
    FieldChange as FieldChange,
    GraphDiff as GraphDiff,
    MetricChange as MetricChange,
    NodeChange as NodeChange,
    SizeDiff as SizeDiff,
)
from graphkit.records.foreign import (
    ForeignRecord as ForeignRecord,
    Process as Process,
    RecordWithGraphs as RecordWithGraphs,
    require_graphs as require_graphs,
)
from graphkit.records.generate import Completion as Completion, GenerateRecord as GenerateRecord
from graphkit.records.graph import (
    GraphMemory as GraphMemory,
    GraphRecord as GraphRecord,
    Segment as Segment,
    Timing as Timing,
)
from graphkit.records.memory import MemoryEstimate as MemoryEstimate, ModeMemory as ModeMemory
from graphkit.records.node import (
    Argument as Argument,
    Edge as Edge,
    Gap as Gap,
    Node as Node,
    Pointer as Pointer,
    Timeline as Timeline,
)
from graphkit.records.record import (
    SCHEMA as SCHEMA,
    Environment as Environment,
    Record as Record,
    load_record as load_record,
)
from graphkit.records.text import (
    count_of as count_of,
    distinct_text as distinct_text,
    extent as extent,
    figure_heading as figure_heading,
    figure_name as figure_name,
    listed as listed,
    tensor_text as tensor_text,
)
from graphkit.records.wrapper import (
    WrapperDifference as WrapperDifference,
    WrapperRecord as WrapperRecord,
)
