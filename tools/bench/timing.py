"""Timing functions and the command line of the benchmarks.

All times are medians, because the machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report_file import add_out, write_report
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from graphkit.graphs import resolve_device
from graphkit.records import BenchReport
from graphkit.views import bench_view

_CALLS = 300
_PROFILER_CALLS = ("cudaDeviceSynchronize", "Activity Buffer Request", "cuptiActivity")


@dataclass(frozen=True)
class Variant:
    """One implementation of a step. ``act(prepare())`` is called, and only ``act`` is timed."""

    act: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def publish(
    doc: str,
    rounds: int,
    make: Callable[..., BenchReport],
    argv: list[str] | None,
    *,
    has_device: bool = False,
) -> int:
    """Run a benchmark's command: measure without gradients, print, and write to ``--out``.

    Args:
        doc: The benchmark's docstring; its first line is the description in ``--help``.
        rounds: Default of ``--rounds``.
        make: Runs the benchmark with a number of rounds, and a device if it has one.
        argv: Arguments of the command; ``None`` takes those of the process.
        has_device: Whether the command has the option ``--device``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add_out(parser)
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"repetitions of each measurement ({rounds})"
    )
    if has_device:
        parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    options = parser.parse_args(argv)
    device = [resolve_device(options.device)] if has_device else []
    with torch.no_grad():
        report = make(options.rounds, *device)
    show(report, options.out)
    return 0


def show(report: BenchReport, out: Path | None) -> bool:
    """Print a report, write it to a file if one is named, and return whether a bar is missed."""
    Console(width=120).print(bench_view(report))
    write_report(report, out)
    return any(each.bar is not None and each.value > each.bar for each in report.measures)


def host_us(variants: Mapping[str, Variant], rounds: int) -> dict[str, float]:
    """Return the median host microseconds per call of each variant, from an idle device.

    The variants alternate in every round, so that load on the machine affects all of them.
    """
    medians: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        times_us(variant, 30)
    for _ in range(rounds):
        for name, variant in variants.items():
            medians[name].append(median(times_us(variant, _CALLS)))
    return {name: median(each) for name, each in medians.items()}


def api_calls(variant: Variant, calls: int = 20) -> dict[str, float]:
    """Return the CUDA API calls per call of a variant, as ``counted_calls`` counts them."""
    return counted_calls(variant.act, calls, variant.prepare)


def counted_calls(
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
            and event.device_type == torch.autograd.DeviceType.CPU
        ):
            yield event.name


def kernel_us(variant: Variant, calls: int = 50) -> dict[str, float]:
    """Return the median GPU microseconds of each kernel by name, from an idle device."""
    variant.act(variant.prepare())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            one = variant.prepare()
            torch.cuda.synchronize()
            variant.act(one)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time_total)
    return {name: median(each) for name, each in times.items()}


def times_us(variant: Variant, calls: int) -> list[float]:
    """Return the host microseconds of each of ``calls`` calls, from an idle device."""
    times = []
    for _ in range(calls):
        prepared = variant.prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        variant.act(prepared)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return times
