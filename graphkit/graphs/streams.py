"""The CUDA streams that a process uses, and what they cost.

On an H200 with driver 580, a process replays in one of two states. A decode step of 32 large layers
takes 5.72 or 6.19 ms, a graph of 1,000 tiny kernels 0.96 or 1.14 ms. A process gets slow when it
runs a step without a graph on a stream other than its first, with or without its matrix products.
Single kernels, copies and allocations there change nothing, nor do captures and replays, nor the
number of streams. A second CUDA context makes the process fast again, even if it is destroyed at
once, until a step runs on another stream again (``tools/bench/streams.py``).

graphkit therefore runs everything on the current stream of the caller: warm-ups, diagnoses,
refreshes, replays and eager steps. ``CudaBackend`` has a capture stream, because CUDA refuses to
capture the default stream; no step runs on it. All runners of a device share one ``CudaBackend`` by
default. Branches inside a graph run on streams of the driver, which no function lists.

The cause is not known. One candidate is that streams of graphs and of eager steps share a work
queue of the device (https://github.com/pytorch/pytorch/issues/176582).
"""

from __future__ import annotations

import logging

import torch

from graphkit.graphs.pool_memory import memory_segments

logger = logging.getLogger(__name__)
ONE_STREAM_ADVICE = (
    "run eager steps on one stream: kernels on a second one slow an H200's replays by 8 to 18 %"
)
"""How replays stay fast. No function of CUDA tells which state a process is in."""


_first_streams: dict[int, int] = {}
"""Handle of the stream of the first step without a graph, by index of the device."""
_SECOND_STREAM = -1
"""In its place once a step has run on another stream, which has been logged."""


def note_eager_step(device: torch.device) -> None:
    """Log a warning when steps without a graph run on a second stream. Call it before each.

    The warning is logged once per device. Does nothing on a CPU and during a capture.

    Args:
        device: The device of the step; without an index the current one.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    current = torch.cuda.current_stream(device)
    index, handle = current.device.index, current.cuda_stream
    first = _first_streams.setdefault(index, handle)
    if first not in (handle, _SECOND_STREAM):
        _first_streams[index] = _SECOND_STREAM
        logger.warning(
            "A step without a graph runs on a second stream of cuda:%d, after which replays of "
            "this process may be slow: %s.",
            index,
            ONE_STREAM_ADVICE,
        )


def streams_in_use(device: torch.device) -> frozenset[int]:
    """Return the handles of the streams that this process is known to use on a CUDA device.

    CUDA lists no streams. The result has the current stream, and the streams that
    ``torch.cuda.memory_snapshot`` shows as owners of device memory, allocated or cached. It is a
    lower bound: a stream is missing if its kernels use memory of other streams only, if
    ``torch.cuda.empty_cache`` freed its memory, or if it belongs to a library that allocates
    without torch, such as NCCL. Capture streams are among them: they own the workspaces of
    libraries. It is empty while torch has not initialised CUDA.

    Args:
        device: The device; without an index the current one.
    """
    if not torch.cuda.is_initialized():
        return frozenset()
    current = torch.cuda.current_stream(device)
    index, segments = current.device.index, memory_segments()
    owners = {segment["stream"] for segment in segments if segment["device"] == index}
    return frozenset({*owners, current.cuda_stream})


def restore_fast_replays(device: torch.device) -> None:
    """Create a CUDA context and destroy it, after which replays of this process are fast.

    The context takes some of the device's memory while it exists. Nothing changes on a CPU, without
    cuda-bindings, or if the device refuses a second context.

    Args:
        device: The device; without an index the current one.

    Raises:
        DeviceError: An earlier asynchronous call of the process failed.
    """
    if device.type != "cuda":
        return
    from graphkit.graphs.driver import checked, runtime

    if runtime() is None:
        return
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    (handle,) = checked(driver.cuDeviceGet(torch.cuda.current_stream(device).device.index))
    error, context = driver.cuCtxCreate(None, 0, handle)
    if int(error) != 0:  # too little memory, or a device for one context only
        return
    checked(driver.cuCtxPopCurrent())
    checked(driver.cuCtxDestroy(context))
    logger.info("Created and destroyed a context of %s, after which replays are fast.", device)
