"""The CUDA streams that a process has used.

A process whose kernels ran on one or two streams replays graphs fastest. From the third stream on,
every later replay takes longer for the rest of the process (``tools/bench/streams.py``).

graphkit itself uses two streams: the current stream of the caller, for refreshes, replays and eager
steps, and the capture stream of ``CudaBackend``, for warm-ups and captures. All runners of a device
share one ``CudaBackend`` by default; each further one adds a stream. Branches inside a graph run on
streams of the driver, which no function lists.
"""

from __future__ import annotations

import torch

FREE_STREAMS = 2
"""Streams that slow no replay: the current one and the one that captures."""
THIRD_STREAM_COST = (
    "a third makes every replay of the process slower, by 8 % for an 8B model on an H200"
)


def streams_in_use(device: torch.device) -> frozenset[int]:
    """Return the handles of the streams that this process is known to use on a CUDA device.

    CUDA lists no streams. The result has the current stream, and the streams that
    ``torch.cuda.memory_snapshot`` shows as owners of device memory, allocated or cached. It is a
    lower bound: a stream is missing if its kernels use memory of other streams only, if
    ``torch.cuda.empty_cache`` freed its memory, or if it belongs to a library that allocates
    without torch, such as NCCL. It is empty while torch has not initialised CUDA.

    Args:
        device: The device; without an index the current one.
    """
    if not torch.cuda.is_initialized():
        return frozenset()
    current = torch.cuda.current_stream(device)
    segments = torch.cuda.memory_snapshot()
    owners = {each["stream"] for each in segments if each["device"] == current.device.index}
    return frozenset({*owners, current.cuda_stream})


def third_stream_warning(device: torch.device) -> str:
    """Return a sentence about the streams in use if they slow replays; empty if they do not.

    Args:
        device: As for ``streams_in_use``.
    """
    count = len(streams_in_use(device))
    if count <= FREE_STREAMS:
        return ""
    return f"this process uses at least {count} streams: {THIRD_STREAM_COST}."
