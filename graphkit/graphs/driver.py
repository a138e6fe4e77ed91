"""What torch does not offer for its graphs, through cuda-bindings where they are installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from graphkit.errors import DeviceError, ReplayError

_LOWEST_OF_CUDA = 1 << 40
"""CUDA places nothing below unless told to; asking about every small number would take its time."""


def runtime() -> Any | None:
    """The CUDA runtime bindings, or ``None`` where the extra ``cuda`` is not installed."""
    try:
        from cuda.bindings import runtime as bindings
    except ImportError:
        return None
    return bindings


@cache
def driver_version() -> str:
    """Version of the NVIDIA driver, such as ``580.159.04``; empty if it cannot be found out."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(answer.stdout.split()), "")


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a kept graph; 0 without the bindings."""
    bindings = runtime()
    if bindings is None:
        return 0
    template = bindings.cudaGraph_t(graph.raw_cuda_graph())
    return int(checked(bindings.cudaGraphGetNodes(template))[-1])


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Upload the executable, so that its first replay is as fast as the second."""
    bindings = runtime()
    if bindings is None:
        return
    executable = bindings.cudaGraphExec_t(graph.raw_cuda_graph_exec())
    checked(bindings.cudaGraphUpload(executable, bindings.cudaStream_t(stream.cuda_stream)))


def launcher(graph: torch.cuda.CUDAGraph) -> Callable[[Any], None] | None:
    """A call that launches the graph on a stream as ``stream_of`` gives it, and does nothing else.

    ``CUDAGraph.replay`` also asks whether the stream is capturing and sees to the random state.
    ``None`` without the bindings.
    """
    bindings = runtime()
    if bindings is None:
        return None
    executable = bindings.cudaGraphExec_t(graph.raw_cuda_graph_exec())
    graph_launch, success = bindings.cudaGraphLaunch, bindings.cudaError_t.cudaSuccess

    def launch(stream: Any) -> None:
        (error,) = graph_launch(executable, stream)
        if error is not success and error != success:
            raise ReplayError(f"CUDA refused to launch a graph: {error!r}.")

    return launch


def stream_of(stream: torch.cuda.Stream) -> Any:
    """The stream as the bindings want it; ``None`` without them."""
    bindings = runtime()
    return None if bindings is None else bindings.cudaStream_t(stream.cuda_stream)


def begin_empty_capture(stream: torch.cuda.Stream) -> None:
    """Begin a capture that torch does not know of; nothing happens without the bindings."""
    bindings = runtime()
    if bindings is None:
        return
    mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    checked(bindings.cudaStreamBeginCapture(bindings.cudaStream_t(stream.cuda_stream), mode))


def capturing_counter() -> Callable[[], int]:
    """A call that says how many nodes the capture on the current stream has so far.

    Always 0 where nothing is being captured, and without the bindings.
    """
    bindings = runtime()
    if bindings is None or not torch.cuda.is_current_stream_capturing():
        return lambda: 0
    stream = bindings.cudaStream_t(torch.cuda.current_stream().cuda_stream)
    graph = checked(bindings.cudaStreamGetCaptureInfo(stream))[2]
    get_nodes = bindings.cudaGraphGetNodes
    return lambda: int(get_nodes(graph)[-1])


def memory_kind(address: int) -> str:
    """What CUDA knows of an address: ``host``, ``external`` for a device's, or ``""``."""
    if address < _LOWEST_OF_CUDA:
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
    """What a call of the bindings returned after its error.

    Raises:
        DeviceError: There was one.
    """
    error, *values = result
    if int(error) != 0:
        raise DeviceError(f"CUDA refused a call: {error!r}. An earlier error may stand behind it.")
    return tuple(values)
