"""Device time of a block, and CPU time that a thread spends in waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def device_ms(device: torch.device) -> Iterator[list[float]]:
    """Measure the device's time of a block; the list has the milliseconds after it."""
    result: list[float] = []
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield result
        after.record()
        after.synchronize()
        result.append(before.elapsed_time(after))
    else:
        began = time.perf_counter()
        yield result
        result.append((time.perf_counter() - began) * 1e3)


@contextmanager
def waits() -> Iterator[list[float]]:
    """Collect the CPU seconds that the thread spends in waits for events during a block.

    CUDA waits for an event in a busy loop.
    """
    seconds: list[float] = []
    wait = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        began = time.thread_time()
        wait(event)
        seconds.append(time.thread_time() - began)

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
