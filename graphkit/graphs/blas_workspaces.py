"""Workspaces of cuBLAS and cuBLASLt.

torch allocates them at the first matrix product on a stream and keeps them for that stream (2.11;
``CublasHandlePool.cpp``). If that product is part of a capture, they belong to the pool of its
graph: the pool is not freed with its graphs, and another capture of the same step has another
memory layout.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from graphkit.graphs.driver import checked, runtime, runtime_stream


def allocate_workspaces(stream: torch.cuda.Stream) -> None:
    """Let torch allocate the workspaces of a stream outside of all pools. Runs no kernel.

    Captures a product without torch and drops the graph, since torch has no function that
    allocates the workspace of cuBLASLt. Without cuda-bindings that of cuBLAS alone.

    Args:
        stream: Must not be capturing. Not the default stream.
    """
    bindings = runtime()
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
        if bindings is None:
            return
        square = torch.empty(16, 16, device=stream.device, dtype=torch.float32)
        # torch maps memory meanwhile, which CUDA refuses in the other modes.
        mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        checked(bindings.cudaStreamBeginCapture(runtime_stream(stream), mode))
        try:
            with suppress(RuntimeError):  # torch has allocated the workspace before it can fail
                torch.addmm(square[0], square, square)  # with a bias, torch calls cuBLASLt
        finally:
            error, *template = bindings.cudaStreamEndCapture(runtime_stream(stream))
            if int(error) == 0:
                checked(bindings.cudaGraphDestroy(*template))
