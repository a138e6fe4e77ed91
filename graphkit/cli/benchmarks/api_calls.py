"""Calls of the CUDA API that an act makes, counted by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
from torch.profiler import ProfilerActivity, profile

_PROFILER_CALLS = ("cudaDeviceSynchronize", "Activity Buffer Request", "cuptiActivity")


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
