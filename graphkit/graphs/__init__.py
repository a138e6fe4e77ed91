"""Capturing a function and running it again, on CUDA or on any machine."""

from graphkit.graphs.backend import Backend, CapturedGraph
from graphkit.graphs.chained import ChainedGraph
from graphkit.graphs.cuda import CudaBackend
from graphkit.graphs.devices import backend_for, resolve_device
from graphkit.graphs.environment import environment, installed
from graphkit.graphs.failures import CaptureFailure
from graphkit.graphs.recorder import RecorderBackend
from graphkit.graphs.size_table import SizeTable, default_batch_sizes
from graphkit.graphs.state import preserved

__all__ = [
    "Backend",
    "CaptureFailure",
    "CapturedGraph",
    "ChainedGraph",
    "CudaBackend",
    "RecorderBackend",
    "SizeTable",
    "backend_for",
    "default_batch_sizes",
    "environment",
    "installed",
    "preserved",
    "resolve_device",
]
