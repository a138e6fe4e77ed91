"""Capturing a function and running it again, on CUDA or on any machine."""

from graphkit.graphs.attribution import Attribution, Stage, scope
from graphkit.graphs.backend import Backend, CapturedGraph
from graphkit.graphs.chained import ChainedGraph
from graphkit.graphs.collector import collector_off
from graphkit.graphs.cuda import CudaBackend
from graphkit.graphs.devices import backend_for, resolve_device
from graphkit.graphs.environment import environment, installed
from graphkit.graphs.failures import CaptureFailure
from graphkit.graphs.host_memory import OTHER_UNSET
from graphkit.graphs.places import caller_line
from graphkit.graphs.recorder import RecorderBackend
from graphkit.graphs.size_table import SizeTable, default_batch_sizes
from graphkit.graphs.state import preserved
from graphkit.graphs.walk import inspect_graph, tensors_of

__all__ = [
    "OTHER_UNSET",
    "Attribution",
    "Backend",
    "CaptureFailure",
    "CapturedGraph",
    "ChainedGraph",
    "CudaBackend",
    "RecorderBackend",
    "SizeTable",
    "Stage",
    "backend_for",
    "caller_line",
    "collector_off",
    "default_batch_sizes",
    "environment",
    "inspect_graph",
    "installed",
    "preserved",
    "resolve_device",
    "scope",
    "tensors_of",
]
