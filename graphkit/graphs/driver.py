"""Calls of the CUDA runtime and driver that torch does not offer, through cuda-bindings.

cuda-bindings are optional (the extra ``cuda``). Every function here says what it does without them.
Checked on cuda-bindings 13.3 with driver 580.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import torch

from graphkit.errors import DeviceError, ReplayError

_LOWEST_CUDA_ADDRESS = 1 << 40
"""CUDA maps nothing below by default. Querying every small number would be slow."""
_COUNTED_BYTES, _MOST_NODES = 32 << 20, 1 << 16
"""Memory that ``executable_bytes_per_node`` observes, 16 blocks, and the nodes at which it ends."""


def runtime() -> Any | None:
    """Return the CUDA runtime bindings, or ``None`` if they are not installed."""
    try:
        from cuda.bindings import runtime as bindings
    except ImportError:
        return None
    return bindings


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of nodes of a kept graph (``cudaGraphGetNodes``); 0 without bindings."""
    bindings = runtime()
    if bindings is None:
        return 0
    template = bindings.cudaGraph_t(graph.raw_cuda_graph())
    return int(checked(bindings.cudaGraphGetNodes(template))[-1])


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Upload the executable (``cudaGraphUpload``), so that its first replay is a fast one.

    Does nothing without bindings.
    """
    bindings = runtime()
    if bindings is None:
        return
    checked(bindings.cudaGraphUpload(runtime_executable(graph), runtime_stream(stream)))


def launch_function(executable: Any) -> Callable[[Any], None]:
    """Return a function that launches an executable on a ``runtime_stream`` (``cudaGraphLaunch``).

    It makes one CUDA call. ``CUDAGraph.replay`` also checks the stream's capture status and
    advances the random generator.
    """
    bindings = runtime()
    assert bindings is not None, "the bindings created the executable"
    graph_launch, success = bindings.cudaGraphLaunch, bindings.cudaError_t.cudaSuccess

    def launch(stream: Any) -> None:
        (error,) = graph_launch(executable, stream)
        if error is not success and error != success:
            raise ReplayError(
                f"cudaGraphLaunch failed with {error!r}. An earlier asynchronous error may be the "
                "cause: run with CUDA_LAUNCH_BLOCKING=1 to find it."
            )

    return launch


def runtime_executable(graph: torch.cuda.CUDAGraph) -> Any:
    """Return the executable of a graph as the bindings take it; ``None`` without them."""
    bindings = runtime()
    return None if bindings is None else bindings.cudaGraphExec_t(graph.raw_cuda_graph_exec())


def runtime_stream(stream: torch.cuda.Stream) -> Any:
    """Return the stream as the bindings take it; ``None`` without them."""
    bindings = runtime()
    return None if bindings is None else bindings.cudaStream_t(stream.cuda_stream)


def begin_empty_capture(stream: torch.cuda.Stream) -> None:
    """Begin a capture without torch (``cudaStreamBeginCapture``); nothing without bindings."""
    bindings = runtime()
    if bindings is None:
        return
    mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    checked(bindings.cudaStreamBeginCapture(runtime_stream(stream), mode))


def drop_capture(stream: torch.cuda.Stream) -> None:
    """End a capture without torch, and destroy its graph if CUDA accepted it.

    Uses ``cudaStreamEndCapture`` and ``cudaGraphDestroy``. Does nothing without bindings.
    """
    bindings = runtime()
    if bindings is None:
        return
    error, *template = bindings.cudaStreamEndCapture(runtime_stream(stream))
    if int(error) == 0:
        checked(bindings.cudaGraphDestroy(*template))


def captured_node_counter() -> Callable[[], int]:
    """Return a function that counts the nodes captured so far on the current stream.

    Uses ``cudaStreamGetCaptureInfo`` and ``cudaGraphGetNodes``. The function always returns 0 if
    the stream is not capturing, and without bindings.
    """
    bindings = runtime()
    if bindings is None or not torch.cuda.is_current_stream_capturing():
        return lambda: 0
    stream = runtime_stream(torch.cuda.current_stream())
    graph = checked(bindings.cudaStreamGetCaptureInfo(stream))[2]
    get_nodes = bindings.cudaGraphGetNodes
    return lambda: int(get_nodes(graph)[-1])


def driver_bytes(device: torch.device) -> int:
    """Return the used memory of a device that is not torch's (``cudaMemGetInfo``).

    That is memory of the driver, such as executables of graphs, and of other processes.
    """
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def executable_bytes_per_node(
    graphs: Iterable[tuple[torch.cuda.CUDAGraph, int]], device: torch.device
) -> float:
    """Return the driver's memory per node of an executable, from further executables of graphs.

    The driver takes memory in blocks of 2 MiB that hold several executables, and keeps what
    destroyed ones leave. So executables are made until several blocks were taken, and those before
    the first block do not count. All are destroyed. The driver keeps their memory for later
    executables, so that each call takes further memory. Waits for the device.

    Returns:
        Bytes; 0.0 without graphs or bindings, or if the driver took no block.
    """
    bindings = runtime()
    templates = [(graph, nodes) for graph, nodes in graphs if nodes]
    if bindings is None or not templates:
        return 0.0
    stream = runtime_stream(torch.cuda.current_stream(device))
    used, made = driver_bytes(device), 0
    blocks: list[tuple[int, int]] = []
    with ExitStack() as executables:
        for graph, nodes in cycle(templates):
            template = bindings.cudaGraph_t(graph.raw_cuda_graph())
            executable = checked(bindings.cudaGraphInstantiate(template, 0))[0]
            executables.callback(bindings.cudaGraphExecDestroy, executable)
            checked(bindings.cudaGraphUpload(executable, stream))
            made += nodes
            if (now := driver_bytes(device)) > used:
                used = now
                blocks.append((made, now))
            if made > _MOST_NODES or (blocks and used - blocks[0][1] >= _COUNTED_BYTES):
                break
        torch.cuda.synchronize(device)
    if not blocks:
        return 0.0
    (first_nodes, first_bytes), (nodes, last_bytes) = blocks[0], blocks[-1]
    return (last_bytes - first_bytes) / max(1, nodes - first_nodes)


def memory_kind(address: int) -> str:
    """Return the kind of memory at an address: ``host``, ``external`` (device) or ``""`` (none).

    From ``cuPointerGetAttribute``; empty without bindings.
    """
    if address < _LOWEST_CUDA_ADDRESS:
        return ""
    try:
        from cuda.bindings import driver
    except ImportError:
        return ""
    which = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, kind = driver.cuPointerGetAttribute(which, address)
    if int(error) != 0:
        return ""
    return "host" if int(kind) == 1 else "external"


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values that a call of the bindings returned after its error code.

    Raises:
        DeviceError: The call failed.
    """
    error, *values = result
    if int(error) != 0:
        raise DeviceError(
            f"a CUDA call failed with {error!r}. An earlier asynchronous error may be the cause: "
            "run with CUDA_LAUNCH_BLOCKING=1 to find it."
        )
    return tuple(values)
