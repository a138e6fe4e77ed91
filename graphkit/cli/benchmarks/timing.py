"""Device time of a block, CPU time of waits for the device, and calls of the CUDA API."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
from torch.profiler import ProfilerActivity, profile

_PROFILER_CALLS = ("cudaDeviceSynchronize", "Activity Buffer Request", "cuptiActivity")


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


def api_calls(
    act: Callable[[Any], object], calls: int, prepare: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Return the CUDA API calls per ``act(prepare())`` by name, except the profiler's own.

    Launches are slower in a process that has used the profiler. Measure times before.

    Args:
        act: What is counted, after two runs that are not.
        calls: Runs that are counted.
        prepare: Runs before each ``act``; its calls are not counted.
    """
    for argument in [prepare() for _ in range(2)]:
        act(argument)
    torch.cuda.synchronize()
    counted: Counter[str] = Counter()
    for _ in range(calls):
        argument = prepare()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            act(argument)
        torch.cuda.synchronize()
        counted.update(_names(profiler))
    return {name: count / calls for name, count in sorted(counted.items())}


def _names(profiler: profile) -> Iterator[str]:
    for event in profiler.events() or []:
        if (
            event.name.startswith(("cuda", "cu"))
            and not event.name.startswith(_PROFILER_CALLS)
            and event.device_type == DeviceType.CPU
        ):
            yield event.name
