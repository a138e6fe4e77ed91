"""Random replays of all modes, each compared bit by bit with its padded step without a graph.

The reference models run as chains and as trees, with a step of declared inputs beside them. For
each mode and live size some batches run once through ``run_padded``, and the outputs stay on the
device. Then random batches are replayed by ``replay``, ``run`` and ``stage``, and each comparison
is enqueued behind its replay. A staged batch waits until its runner has its next turn.

Outputs do not depend on earlier replays: a step reads committed KV, which no replay writes, and
the slots that it has just written.

    python tools/bench/random_replays.py --out tools/bench/results/random_replays.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from compared_replays import Case, Comparisons, case_of, mode_name
from declared_step import with_declared_step
from report_file import add_out
from timing import show

from graphkit.graphs import environment, resolve_device
from graphkit.models.reference import reference_target
from graphkit.records import BenchReport, Measure
from graphkit.runners import Runner, StagedBatch
from graphkit.runners.targets import CaptureTarget

WAYS = ("replay", "run", "stage")
READ_EVERY = 4096
"""Replays between two reads of their comparisons."""
NOTE_EVERY = 100_000
NAMED = 20
"""Most mismatches that a report names."""


def replay_randomly(cases: Sequence[Case], replays: int, seed: int) -> Comparisons:
    """Replay random cases in random ways, and compare each output."""
    device, fields = cases[0].runner.device, max(len(case.expected) for case in cases)
    comparisons = Comparisons(device, READ_EVERY, fields)
    waiting: dict[Runner[Any, Any], tuple[Case, StagedBatch[Any]]] = {}

    def replay_staged(runner: Runner[Any, Any]) -> None:
        case, staged = waiting.pop(runner)
        comparisons.compare(case, staged.replay(), "stage")

    for turn, (case, way) in enumerate(turns(cases, replays, seed)):
        if turn % NOTE_EVERY == 0:
            note(f"{turn:,} replays")
        if case.runner in waiting:
            replay_staged(case.runner)
        if way == "stage":
            waiting[case.runner] = case, case.stage()
        else:
            comparisons.compare(case, getattr(case.runner, way)(case.batch), way)
    for runner in list(waiting):
        replay_staged(runner)
    comparisons.read()
    return comparisons


def turns(cases: Sequence[Case], count: int, seed: int) -> Iterator[tuple[Case, str]]:
    """Yield random cases, each with a random way to replay it."""
    random = np.random.default_rng(seed)
    for first in range(0, count, READ_EVERY):
        size = min(READ_EVERY, count - first)
        drawn = random.integers([[len(cases)], [len(WAYS)]], size=(2, size))
        for case, way in drawn.T.tolist():
            yield cases[case], WAYS[way]


def note(text: str) -> None:
    """Print progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


def measures(
    targets: Sequence[CaptureTarget], device: torch.device, replays: int, seed: int, batches: int
) -> Iterator[Measure]:
    """Capture every mode, make the cases, replay them, and yield counts and times.

    Args:
        targets: All their modes are captured.
        device: Device of the targets.
        replays: Number of replays.
        seed: Determines the order of the replays.
        batches: Number of batches per mode and live size.
    """
    with ExitStack() as stack:
        runners: dict[str, Runner[Any, Any]] = {}
        cases: list[Case] = []
        began = time.perf_counter()
        for target in targets:
            for mode in target.forwards:
                runner = stack.enter_context(target.runner(mode, device=device))
                runner.capture()
                runners[mode_name(target, runner)] = runner
                for live in range(1, runner.table.max_batch_size + 1):
                    cases += (case_of(target, runner, live, each) for each in range(batches))
                note(f"captured {mode_name(target, runner)}")
        prepared = time.perf_counter()
        found = replay_randomly(cases, replays, seed)
        ended = time.perf_counter()
    stats = {name: runner.stats for name, runner in runners.items()}
    yield Measure(name="mismatches", value=len(found.mismatches), unit="", bar=0)
    for name in found.mismatches[:NAMED]:
        yield Measure(name=name, value=1, unit="", bar=0)
    fallbacks = sum(sum(each.fallbacks.values()) for each in stats.values())
    yield Measure(name="fallbacks", value=fallbacks, unit="", bar=0)
    yield Measure(name="captures and padded runs", value=prepared - began, unit="s")
    yield Measure(name="replays and comparisons", value=ended - prepared, unit="s")
    for name, each in stats.items():
        yield Measure(name=f"replays: {name}", value=each.replays, unit="")
    for way, count in sorted(found.ways.items()):
        yield Measure(name=f"replays: {way}", value=count, unit="")
    for live, count in sorted(found.sizes.items()):
        yield Measure(name=f"replays: {live} live", value=count, unit="")


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a replay differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--replays", type=int, default=1_000_000, help="replays (1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of replays (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--batches", type=int, default=8, help="batches per mode and live size (8)")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    targets = [with_declared_step(reference_target(str(device), topk=topk)) for topk in (1, 2)]
    settings = {name: getattr(options, name) for name in ("replays", "seed", "batches")}
    with torch.no_grad():
        report = BenchReport(
            name="random replays: each compared bit by bit with its padded step",
            environment=environment(device),
            settings=settings,
            measures=tuple(measures(targets, device, **settings)),
        )
    return int(show(report, options.out))


if __name__ == "__main__":
    sys.exit(main())
