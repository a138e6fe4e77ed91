"""Conditions of ``streams.py`` that differ in what happens beside the replays.

All capture on a new stream and replay on the default stream. A condition yields the name of a
state; the replays are measured at each yield.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from decode_graphs import DecodeGraphs

from graphkit.graphs.driver import checked, runtime, runtime_stream

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")
OTHER_PROCESS = """
from cuda.bindings import driver
def checked(result):
    assert int(result[0]) == 0, result
    return result[-1]
checked(driver.cuInit(0))
device = checked(driver.cuDeviceGet(0))
checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
checked(driver.cuMemsetD8(checked(driver.cuMemAlloc(1 << 20)), 0, 1 << 20))
checked(driver.cuCtxSynchronize())
print("ready", flush=True)
input()
"""
"""A process with a context that has run a kernel, and waits for a line."""
States = Iterator[str]


def created(*, blocking: bool = False) -> torch.cuda.ExternalStream:
    """Return a new stream outside of torch's pool, whose streams do not block."""
    bindings = runtime()
    flag = bindings.cudaStreamDefault if blocking else bindings.cudaStreamNonBlocking
    return torch.cuda.ExternalStream(int(checked(bindings.cudaStreamCreateWithFlags(flag))[0]))


def nothing(graphs: DecodeGraphs) -> States:
    """Show the drift of the measurement."""
    graphs.capture()
    yield "before"
    yield "again"


def more_streams(graphs: DecodeGraphs) -> States:
    """Use further streams one after the other, then wait."""
    graphs.capture()
    yield "before"
    for name, count in (("one more", 1), ("two more", 1), ("seven more", 5)):
        for _ in range(count):
            graphs.run_kernel(torch.cuda.Stream())
        yield name
    time.sleep(1)
    yield "1 s later"


def kernel_on(new_stream: Callable[[], torch.cuda.Stream]) -> Callable[[DecodeGraphs], States]:
    """Return a condition that runs one kernel on a stream of a certain kind."""

    def states(graphs: DecodeGraphs) -> States:
        graphs.capture()
        yield "before"
        graphs.run_kernel(new_stream())
        yield "used"

    return states


def used_then_destroyed(graphs: DecodeGraphs) -> States:
    """Create a stream, use it, destroy it."""
    graphs.capture()
    yield "before"
    stream = created()
    yield "created"
    graphs.run_kernel(stream)
    yield "used"
    bindings = runtime()
    checked(bindings.cudaStreamDestroy(runtime_stream(stream)))
    torch.cuda.synchronize()
    yield "destroyed"


def copy(source: torch.device, target: torch.device) -> Callable[[DecodeGraphs], States]:
    """Return a condition that copies on a further stream, and then runs a kernel there."""

    def states(graphs: DecodeGraphs) -> States:
        graphs.capture()
        stream = created()
        tensors = [
            torch.zeros(1 << 20, device=device, pin_memory=device == HOST)
            for device in (source, target)
        ]
        yield "before"
        with torch.cuda.stream(stream):
            tensors[1].copy_(tensors[0], non_blocking=True)
        stream.synchronize()
        yield "copied"
        graphs.run_kernel(stream)
        yield "kernel on it"

    return states


def memset(graphs: DecodeGraphs) -> States:
    """Fill memory on a further stream."""
    graphs.capture()
    target = torch.ones(1 << 20, device="cuda")
    yield "before"
    stream = created()
    handle = runtime_stream(stream)
    checked(runtime().cudaMemsetAsync(target.data_ptr(), 0, target.nbytes, handle))
    stream.synchronize()
    yield "filled"


def event_waits(graphs: DecodeGraphs) -> States:
    """Let a further stream wait for the current one, then run a kernel and wait for it, too."""
    graphs.capture()
    yield "before"
    current, stream = torch.cuda.current_stream(), created()
    stream.wait_stream(current)
    stream.synchronize()
    yield "waited"
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graphs.word.add_(1)
    current.wait_stream(stream)
    torch.cuda.synchronize()
    yield "kernel between waits"


def second_context(graphs: DecodeGraphs) -> States:
    """Fill memory in a second context of this process."""
    from cuda.bindings import driver

    graphs.capture()
    yield "before"
    context = checked(driver.cuCtxCreate(None, 0, checked(driver.cuDeviceGet(0))[0]))[0]
    memory = checked(driver.cuMemAlloc(1 << 20))[0]
    checked(driver.cuMemsetD8(memory, 0, 1 << 20))
    checked(driver.cuCtxSynchronize())
    checked(driver.cuCtxPopCurrent())
    yield "used"
    checked(driver.cuCtxDestroy(context))
    yield "destroyed"


def second_process(graphs: DecodeGraphs) -> States:
    """Replay beside another process that holds a context and does nothing."""
    graphs.capture()
    yield "before"
    command = [sys.executable, "-c", OTHER_PROCESS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        if "ready" not in other.stdout.readline():
            raise RuntimeError("the other process could not use the device.")
        yield "beside it"
        other.communicate("\n")
    yield "after its end"
