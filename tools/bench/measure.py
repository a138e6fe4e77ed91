"""How the benchmarks measure and publish. Medians, since machines are shared and noisy."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from graphkit.records import BenchReport
from graphkit.views import bench_view

_CALLS = 300


@dataclass(frozen=True)
class Way:
    """One way of doing a job: ``act(prepare())`` with only ``act`` on the clock."""

    act: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def publish(
    doc: str, rounds: int, make: Callable[[int], BenchReport], argv: list[str] | None
) -> int:
    """Be a benchmark's command: measure without gradients, print, and write to ``--out``.

    Args:
        doc: The benchmark's docstring, for ``--help``.
        rounds: How often it measures unless ``--rounds`` says otherwise.
        make: Measures in so many rounds.
        argv: Words of the command; ``None`` takes those of the process.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args(argv)
    with torch.no_grad():
        report = make(options.rounds)
    Console(width=120).print(bench_view(report))
    if options.out:
        options.out.write_text(report.to_json())
    return 0


def host_us(ways: Mapping[str, Way], rounds: int) -> dict[str, float]:
    """Median host microseconds of each way, the device idle before each call.

    The ways take turns in every round, so that a slow moment of the machine hits all of them.
    """
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        times_us(way, 30)
    for _ in range(rounds):
        for name, way in ways.items():
            medians[name].append(median(times_us(way, _CALLS)))
    return {name: median(each) for name, each in medians.items()}


def api_calls(way: Way, calls: int = 20) -> dict[str, float]:
    """CUDA API calls per call of a way, by name, the profiler's own left out."""
    prepared = [way.prepare() for _ in range(2)]
    for each in prepared:
        way.act(each)
    torch.cuda.synchronize()
    counted: Counter[str] = Counter()
    for _ in range(calls):
        one = way.prepare()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            way.act(one)
        torch.cuda.synchronize()
        counted.update(_api_names(seen))
    return {name: count / calls for name, count in sorted(counted.items())}


def kernel_us(way: Way, calls: int = 50) -> dict[str, float]:
    """Median GPU microseconds of each kernel by name, the device idle before each call."""
    way.act(way.prepare())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            one = way.prepare()
            torch.cuda.synchronize()
            way.act(one)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in seen.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time_total)
    return {name: median(each) for name, each in times.items()}


def times_us(way: Way, calls: int) -> list[float]:
    """Host microseconds of each of so many calls, the device idle before each."""
    times = []
    for _ in range(calls):
        prepared = way.prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        way.act(prepared)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return times


def _api_names(seen: profile) -> list[str]:
    own = ("cudaDeviceSynchronize", "Activity Buffer Request", "cuptiActivity")
    return [
        event.name
        for event in seen.events() or []
        if event.name.startswith(("cuda", "cu"))
        and not event.name.startswith(own)
        and event.device_type == torch.autograd.DeviceType.CPU
    ]
