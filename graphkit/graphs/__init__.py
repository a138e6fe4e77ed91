"""Capture of functions as graphs, on CUDA or on the CPU, and inspection of graphs."""

from graphkit.graphs.attribution import Attribution, NodeOrigin, Stage, scope
from graphkit.graphs.backend import Backend, CapturedGraph, GraphSequence, LoopGraph
from graphkit.graphs.backend_selection import backend_for, resolve_device
from graphkit.graphs.capture_failure import CaptureFailure
from graphkit.graphs.capture_state import is_capturing, is_recording
from graphkit.graphs.cuda import CudaBackend, gc_paused
from graphkit.graphs.cuda_graph import CudaGraph, CudaPool
from graphkit.graphs.environment import environment
from graphkit.graphs.host_memory import UNSET_MARKER
from graphkit.graphs.pool_memory import Allocation, PoolBlock
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.recorder import RecorderBackend
from graphkit.graphs.size_table import SizeTable, default_batch_sizes
from graphkit.graphs.snapshot import StateSnapshot
from graphkit.graphs.source_lines import caller_line
from graphkit.graphs.walk import NamedTensors, inspect_graph, named_tensors

__all__ = [
    "UNSET_MARKER",
    "Allocation",
    "Attribution",
    "Backend",
    "CaptureFailure",
    "CapturedGraph",
    "CudaBackend",
    "CudaGraph",
    "CudaPool",
    "GraphSequence",
    "LoopGraph",
    "NamedTensors",
    "NodeOrigin",
    "PoolBlock",
    "RecordedGraph",
    "RecorderBackend",
    "SizeTable",
    "Stage",
    "StateSnapshot",
    "backend_for",
    "caller_line",
    "default_batch_sizes",
    "environment",
    "gc_paused",
    "inspect_graph",
    "is_capturing",
    "is_recording",
    "named_tensors",
    "resolve_device",
    "scope",
]
