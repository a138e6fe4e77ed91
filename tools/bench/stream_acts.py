"""What the conditions of ``streams.py`` do before and between replays.

An act takes the graphs and uses the current stream.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from operator import methodcaller

import torch
from decode_graphs import DecodeGraphs, Graph, TorchGraph
from graphkit_graphs import RunnerGraph
from torch.nn.functional import rms_norm

from graphkit.graphs import CudaBackend
from graphkit.graphs.driver import checked, runtime
from graphkit.graphs.streams import restore_fast_replays

Act = Callable[[DecodeGraphs], object]
allocate: Act = methodcaller("allocate")
warm_up: Act = methodcaller("warm_up")
capture: Act = methodcaller("capture")
launch: Act = methodcaller("launch")
products: Act = methodcaller("run_products")


def elsewhere(act: Act) -> Act:
    """Return an act that runs another one on a new stream of torch's pool."""

    def run(graphs: DecodeGraphs) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            act(graphs)

    return run


def kernel(graphs: DecodeGraphs) -> None:
    """Run one tiny kernel, which needs no new memory."""
    graphs.word.add_(1)


def kernel_in_new_memory(_graphs: DecodeGraphs) -> None:
    """Run two tiny kernels in new memory: 2 MiB of the driver's if the stream has none yet."""
    torch.zeros(1, device="cuda").add_(1)


def kernels(count: int) -> Act:
    """Return an act that runs tiny kernels in a row."""

    def run(graphs: DecodeGraphs) -> None:
        for _ in range(count):
            kernel(graphs)

    return run


def kernels_with_pauses(graphs: DecodeGraphs) -> None:
    """Run 100 tiny kernels, each after the one before has ended."""
    for _ in range(100):
        kernel(graphs)
        torch.cuda.synchronize()


def reduction(graphs: DecodeGraphs) -> None:
    """Sum a weight."""
    graphs.weight.sum()


def norm(graphs: DecodeGraphs) -> None:
    """Normalise the rows of a weight, with one kernel."""
    rms_norm(graphs.weight, graphs.weight.shape[-1:])


def new_kernel(name: str) -> Act:
    """Return an act that runs an in-place operation, which the driver loads if it is new."""
    return lambda graphs: getattr(graphs.word, name)()


def other_kernels(graphs: DecodeGraphs) -> None:
    """Run all kernels of the layers but the matrix products."""
    graphs.run_layers(lambda x, weight: x.new_empty(len(x), weight.shape[1]))


def small_product(graphs: DecodeGraphs) -> None:
    """Run a product of two 16 x 16 matrices."""
    square = graphs.weight[:16, :16]
    torch.matmul(square, square)


def capture_with_torch(graphs: DecodeGraphs) -> None:
    """Capture the graphs with ``torch.cuda.graph``."""
    graphs.capture(TorchGraph)


def capture_with_graphkit(new_backend: Callable[[], CudaBackend]) -> Act:
    """Return an act that warms up and captures the graphs with runners of one backend."""
    return lambda graphs: graphs.capture(partial(RunnerGraph, backend=new_backend()))


def driver_memory(_graphs: DecodeGraphs) -> None:
    """Map and unmap 64 MiB (``cudaMalloc``, ``cudaFree``)."""
    bindings = runtime()
    checked(bindings.cudaFree(checked(bindings.cudaMalloc(64 << 20))[0]))


def pinned_memory(graphs: DecodeGraphs) -> None:
    """Pin host memory of the size of a weight, which torch keeps for the next use."""
    _pinned_like(graphs.weight)


def copies(graphs: DecodeGraphs) -> None:
    """Copy a weight to pinned memory and back."""
    host = _pinned_like(graphs.weight)
    host.copy_(graphs.weight, non_blocking=True)
    graphs.weight.copy_(host, non_blocking=True)


def event_waits(graphs: DecodeGraphs) -> None:
    """Run a kernel on a new stream between two waits."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        kernel(graphs)
    current.wait_stream(stream)


def high_priority(graphs: DecodeGraphs) -> None:
    """Run a kernel on a new stream of a higher priority."""
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        kernel(graphs)


def branches(graphs: DecodeGraphs) -> None:
    """Launch a graph with 8 branches. The streams that capture them run no kernel."""
    streams = [torch.cuda.Stream() for _ in range(8)]

    def step() -> None:
        first = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(first)
            with torch.cuda.stream(stream):
                kernel(graphs)
        for stream in streams:
            first.wait_stream(stream)

    Graph(step).launch()


def all_streams(graphs: DecodeGraphs) -> None:
    """Run a kernel on each of the 32 streams of torch's pool."""
    for _ in range(32):
        elsewhere(kernel)(graphs)


def stack_limit(graphs: DecodeGraphs) -> None:
    """Set another stack size, which resizes the device's local memory, and restore it."""
    bindings = runtime()
    limit = bindings.cudaLimit.cudaLimitStackSize
    size = int(checked(bindings.cudaDeviceGetLimit(limit))[0])
    for each in (4 * size, size):
        checked(bindings.cudaDeviceSetLimit(limit, each))
        kernel(graphs)
        torch.cuda.synchronize()


def brief_context(_graphs: DecodeGraphs) -> None:
    """Create a second context of this process and destroy it at once."""
    restore_fast_replays(torch.device("cuda"))


def nvidia_smi(_graphs: DecodeGraphs) -> None:
    """Let another process open the device without a context."""
    subprocess.run(["nvidia-smi"], capture_output=True, timeout=30, check=True)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
