"""The CUDA streams that a process has used.

On an H200 with driver 580, a process replays in one of two states: the same graph of 1,312 kernels
takes 5.6 or 6.1 ms. What the process does before its first replay determines the state. Kernels on
further streams after it do not change the state; the creation of a second CUDA context does
(``tools/bench/streams.py``).

graphkit itself uses two streams: the current stream of the caller, for refreshes, replays and eager
steps, and the capture stream of ``CudaBackend``, for warm-ups and captures. All runners of a device
share one ``CudaBackend`` by default; each further one adds a stream. Branches inside a graph run on
streams of the driver, which no function lists.
"""

from __future__ import annotations

import torch

FURTHER_STREAM_COST = "one more alone does not slow replays (H200, driver 580)"
"""What a kernel on one more stream costs later replays, from ``tools/bench/streams.py``."""


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
