"""What torch does not offer for its graphs, through cuda-bindings where they are installed."""

from __future__ import annotations

from typing import Any

import torch


def runtime() -> Any | None:
    """The CUDA runtime bindings, or ``None`` where the extra ``cuda`` is not installed."""
    try:
        from cuda.bindings import runtime as bindings  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return bindings


def driver_version() -> str:
    """The newest CUDA version that the driver serves, such as ``13.0``; empty if unknown."""
    bindings = runtime()
    if bindings is None:
        return ""
    number = int(_checked(bindings.cudaDriverGetVersion())[0])
    return f"{number // 1000}.{number % 1000 // 10}"


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a kept graph; 0 without the bindings."""
    bindings = runtime()
    if bindings is None:
        return 0
    template = bindings.cudaGraph_t(graph.raw_cuda_graph())
    return int(_checked(bindings.cudaGraphGetNodes(template))[-1])


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Upload the executable, so that its first replay is as fast as the second."""
    bindings = runtime()
    if bindings is None:
        return
    executable = bindings.cudaGraphExec_t(graph.raw_cuda_graph_exec())
    _checked(bindings.cudaGraphUpload(executable, bindings.cudaStream_t(stream.cuda_stream)))


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    assert int(error) == 0, f"CUDA answered {error!r}"
    return tuple(values)
