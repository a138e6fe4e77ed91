"""Acts of ``stream_acts.py`` that create contexts beside that of torch."""

from __future__ import annotations

from typing import Any

import torch
from decode_graphs import DecodeGraphs
from stream_acts import kernel

from graphkit.graphs.driver import checked

_SOME_SMS = 16
"""Number of SMs of the green context."""


class SecondContext:
    """A second context of this process."""

    def __init__(self) -> None:
        self._context: Any = None

    def create(self, _graphs: DecodeGraphs) -> None:
        """Create the context and allocate memory in it."""
        from cuda.bindings import driver

        device = checked(driver.cuDeviceGet(0))[0]
        self._context = checked(driver.cuCtxCreate(None, 0, device))[0]
        self._memory = checked(driver.cuMemAlloc(1 << 20))[0]
        checked(driver.cuCtxPopCurrent())

    def fill(self, _graphs: DecodeGraphs) -> None:
        """Fill the memory, which needs a switch of the device between the contexts."""
        from cuda.bindings import driver

        checked(driver.cuCtxPushCurrent(self._context))
        checked(driver.cuMemsetD8(self._memory, 0, 1 << 20))
        checked(driver.cuCtxSynchronize())
        checked(driver.cuCtxPopCurrent())

    def destroy(self, _graphs: DecodeGraphs) -> None:
        """Destroy the context with its memory."""
        from cuda.bindings import driver

        checked(driver.cuCtxDestroy(self._context))


def brief_context(_graphs: DecodeGraphs) -> None:
    """Create a second context and destroy it at once."""
    from cuda.bindings import driver

    device = checked(driver.cuDeviceGet(0))[0]
    context = checked(driver.cuCtxCreate(None, 0, device))[0]
    checked(driver.cuCtxPopCurrent())
    checked(driver.cuCtxDestroy(context))


def brief_filled_context(graphs: DecodeGraphs) -> None:
    """Create a second context, fill memory in it, and destroy it."""
    context = SecondContext()
    for act in (context.create, context.fill, context.destroy):
        act(graphs)


class GreenContext:
    """A green context: another view of torch's own context, limited to some of its SMs."""

    def __init__(self) -> None:
        self._context: Any = None
        self._stream: Any = None

    def create(self, _graphs: DecodeGraphs) -> None:
        """Create the context and a stream of it."""
        from cuda.bindings import driver

        device = checked(driver.cuDeviceGet(0))[0]
        sms = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        resource = checked(driver.cuDeviceGetDevResource(device, sms))[0]
        groups = checked(driver.cuDevSmResourceSplitByCount(1, resource, 0, _SOME_SMS))[0]
        described = checked(driver.cuDevResourceGenerateDesc(groups, 1))[0]
        own_stream = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        self._context = checked(driver.cuGreenCtxCreate(described, device, own_stream))[0]
        non_blocking = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        made = checked(driver.cuGreenCtxStreamCreate(self._context, non_blocking, 0))
        self._stream = made[0]

    def use(self, graphs: DecodeGraphs) -> None:
        """Run a kernel on the stream."""
        with torch.cuda.stream(torch.cuda.ExternalStream(int(self._stream))):
            kernel(graphs)

    def destroy(self, _graphs: DecodeGraphs) -> None:
        """Destroy the stream and the context."""
        from cuda.bindings import driver

        checked(driver.cuStreamDestroy(self._stream))
        checked(driver.cuGreenCtxDestroy(self._context))
