"""Every forward mode at several sizes: eager, replay, and the bare launch of the same graph.

The reference models on real text. Each figure is the median time from the call until its results
are there, and for replay and bare launch also the host time until the call returns. The three take
turns, so that a slow moment of the machine hits all of them.

    python tools/bench/modes.py --out tools/bench/results/modes.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from measure import Way, host_us
from rich.console import Console
from rich.table import Table

import graphkit as gk
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure
from graphkit.reference import reference_target
from graphkit.targets import CaptureTarget

DEVICE = torch.device("cuda")
SIZES = (1, 8, 64)
COLUMNS = ("eager", "replay", "bare launch", "replay, host", "bare launch, host")


def ways(runner: gk.runners.Runner, batch: object) -> dict[str, Callable[[], object]]:
    """The three ways of doing one step."""
    (graph,) = runner.backend.graphs  # the runner has this backend to itself

    def bare() -> None:
        runner.buffers.post_idle()
        graph.graph.replay()

    return {
        "eager": lambda: runner.fall_back(batch),
        "replay": lambda: runner.replay(batch),
        "bare launch": bare,
    }


def whole_us(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each until its results are there."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds * 20 + 5):
        for name, act in acts.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            if turn >= 5:
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: median(each) for name, each in times.items()}


def mode_figures(
    target: CaptureTarget, mode: gk.ForwardMode, size: int, rounds: int
) -> dict[str, float]:
    """One row of the table."""
    with target.runner(
        mode, batch_sizes=[size], device=DEVICE, backend=gk.CudaBackend(DEVICE)
    ) as runner:
        runner.capture()
        acts = ways(runner, target.batch(mode, size, seed=1))
        launches = {name: Way(lambda _, act=act: act()) for name, act in acts.items()}
        host = host_us({name: launches[name] for name in ("replay", "bare launch")}, rounds)
        figures = whole_us(acts, rounds)
    return figures | {f"{name}, host": value for name, value in host.items()}


def measures(topk: int, rounds: int) -> Iterator[Measure]:
    """All figures, each named by mode, size and way."""
    targets = {size: reference_target("cuda", topk=topk, max_batch_size=size) for size in SIZES}
    for mode in targets[SIZES[0]].forwards:
        for size, target in targets.items():
            for way, value in mode_figures(target, mode, size, rounds).items():
                yield Measure(name=f"{mode.name} {size} {way}", value=value, unit="us")


def table_of(report: BenchReport) -> Table:
    """A row per mode and size."""
    facts = report.environment
    table = Table(title=f"{facts.device}, driver {facts.driver}, torch {facts.torch}; us")
    for name in ("mode", "size", *COLUMNS, "eager / replay", "replay / bare, host"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    values = {measure.name: measure.value for measure in report.measures}
    keys = dict.fromkeys(tuple(measure.name.split(" ")[:2]) for measure in report.measures)
    for mode, size in keys:
        eager, replay, bare, host, bare_host = (values[f"{mode} {size} {way}"] for way in COLUMNS)
        table.add_row(
            mode, size, f"{eager:,.0f}", f"{replay:,.0f}", f"{bare:,.0f}", f"{host:.1f}",
            f"{bare_host:.1f}", f"{eager / replay:.1f}x", f"{host / bare_host:.1f}x",
        )  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    options = parser.parse_args(argv)
    with torch.no_grad():
        report = BenchReport(
            name="modes: every forward mode of the reference models",
            environment=environment(DEVICE),
            settings={"topk": options.topk, "rounds": options.rounds, "dtype": "bfloat16"},
            measures=tuple(measures(options.topk, options.rounds)),
        )
    Console(width=140).print(table_of(report))
    if options.out:
        options.out.write_text(report.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
