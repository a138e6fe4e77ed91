"""Every forward mode at several sizes: eager, replay, and a bare launch of the same graph.

The reference models run on real text. Each time is the median from the call until its results are
ready. For replay and bare launch the host time of the call is measured too. The three alternate,
so that load on the machine affects all of them.

    python tools/bench/modes.py --out tools/bench/results/modes.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from report_file import add_out, write_report
from rich.console import Console
from rich.table import Table
from timing import Variant, host_us

import graphkit as gk
from graphkit.graphs import environment
from graphkit.models.reference import reference_target
from graphkit.records import BenchReport, Measure
from graphkit.runners.targets import CaptureTarget

DEVICE = torch.device("cuda")
SIZES = (1, 8, 64)
COLUMNS = ("eager", "replay", "bare launch", "replay, host", "bare launch, host")


def calls(runner: gk.runners.Runner, batch: object) -> dict[str, Callable[[], object]]:
    """Return the three calls that run one step."""
    (graph,) = runner.backend.pool.graphs  # no other runner uses this backend

    def bare() -> None:
        with runner.buffers.posted():
            graph.graph.replay()

    return {
        "eager": lambda: runner.fall_back(batch),
        "replay": lambda: runner.replay(batch),
        "bare launch": bare,
    }


def whole_us(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of each call until its results are ready."""
    samples: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds * 20 + 5):
        for name, act in acts.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            if turn >= 5:
                samples[name].append((time.perf_counter() - began) * 1e6)
    return {name: median(each) for name, each in samples.items()}


def mode_times(
    target: CaptureTarget, mode: gk.ForwardMode, size: int, rounds: int
) -> dict[str, float]:
    """Return the times of one mode and size, one row of the table."""
    with target.runner(
        mode, batch_sizes=[size], device=DEVICE, backend=gk.CudaBackend(DEVICE)
    ) as runner:
        runner.capture()
        acts = calls(runner, target.batch(mode, size, seed=1))
        launches = {name: Variant(lambda _, act=act: act()) for name, act in acts.items()}
        host = host_us({name: launches[name] for name in ("replay", "bare launch")}, rounds)
        times = whole_us(acts, rounds)
    return times | {f"{name}, host": value for name, value in host.items()}


def measures(topk: int, rounds: int) -> Iterator[Measure]:
    """Yield all measures, named by mode, size and call."""
    targets = {size: reference_target("cuda", topk=topk, max_batch_size=size) for size in SIZES}
    for mode in targets[SIZES[0]].forwards:
        for size, target in targets.items():
            for name, value in mode_times(target, mode, size, rounds).items():
                yield Measure(name=f"{mode.name} {size} {name}", value=value, unit="us")


def table_of(report: BenchReport) -> Table:
    """Return a table with a row per mode and size."""
    facts = report.environment
    table = Table(title=f"{facts.device}, driver {facts.driver}, torch {facts.torch}; us")
    for name in ("mode", "size", *COLUMNS, "eager / replay", "replay / bare, host"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    values = {measure.name: measure.value for measure in report.measures}
    keys = dict.fromkeys(tuple(measure.name.split(" ")[:2]) for measure in report.measures)
    for mode, size in keys:
        eager, replay, bare, host, bare_host = (values[f"{mode} {size} {name}"] for name in COLUMNS)
        table.add_row(
            mode, size, f"{eager:,.0f}", f"{replay:,.0f}", f"{bare:,.0f}", f"{host:.1f}",
            f"{bare_host:.1f}", f"{eager / replay:.1f}x", f"{host / bare_host:.1f}x",
        )  # fmt: skip
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the command: measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement (3)")
    parser.add_argument("--topk", type=int, default=1, help="branches per draft step (1)")
    options = parser.parse_args(argv)
    with torch.no_grad():
        report = BenchReport(
            name="modes: every forward mode of the reference models",
            environment=environment(DEVICE),
            settings={"topk": options.topk, "rounds": options.rounds, "dtype": "bfloat16"},
            measures=tuple(measures(options.topk, options.rounds)),
        )
    Console(width=140).print(table_of(report))
    write_report(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
