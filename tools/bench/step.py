"""Time of speculative steps by generation: v1, v2, and many steps in one launch (v3).

The reference engine runs EAGLE chains and trees with full batches of long requests. The variants
take turns, on an idle host and beside two busy processes per core. Each setting is a section of
the report, which is written after each section.

- time per step: wall time of a round divided by its steps, the median of the rounds. The device is
  idle when the clock of a round starts, so that no counted step can begin before.
- p50, p99: intervals between steps as the host receives them; 0 if two arrive together.
- host: CPU time of the host's thread per step without its waits, the least of several runs in each
  idle round. In v3, launch and reading, of 48 launches in each round.
- bare step: device time of the captured greedy step, replayed back to back.
- GPU busy: the bare step divided by the time per step.
- own nodes: nodes of the whole step that no module of a model created.

The calls of the CUDA API are counted after all times are measured, because launches are slower in
a process that has used the profiler. transformers generates with the same weights in a process of
its own.

    python tools/bench/step.py --out tools/bench/results/step.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from busy_processes import busy_processes
from report_file import add_out
from rich.console import Console
from step_engines import VARIANTS, Setting, measured_engine
from step_results import Results, SettingResults

from graphkit.cli.benchmarks import Steps
from graphkit.graphs import resolve_device
from graphkit.views import bench_view

_RIVALS_S = 120.0
_ROUND_LAUNCHES = 4
"""Least launches of a round: a busy host is late at its start, where no launch is enqueued yet."""
_TIMED_LAUNCHES = 48
"""Launches of v3 in each idle round, of whose host times the least counts."""


def measure_setting(
    results: Results, *, setting: Setting, steps: int, rounds: int, processes: int
) -> None:
    """Measure all variants of a setting; without load if ``processes`` is 0."""
    seen = {loaded: {name: Steps() for name in VARIANTS} for loaded in (False, True)}
    bare_ms: dict[bool, list[float]] = {False: [], True: []}
    host_us: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        open_engine = partial(measured_engine, setting, device=results.device)
        engines = {
            name: stack.enter_context(open_engine(variant)) for name, variant in VARIANTS.items()
        }
        alone = stack.enter_context(open_engine(VARIANTS["one launch"]))
        bare = stack.enter_context(closing(alone.bare_step()))
        for loaded in (False, True) * rounds if processes else (False,) * rounds:
            if not loaded:
                host_us = {
                    name: engine.host_us(steps, launches=_TIMED_LAUNCHES)
                    for name, engine in engines.items()
                }
            with busy_processes(processes) if loaded else nullcontext():
                for name, engine in engines.items():
                    least = _ROUND_LAUNCHES * VARIANTS[name].steps_per_launch
                    engine.run(max(steps, least), seen[loaded][name])
                bare_ms[loaded].append(bare.ms(steps))
        SettingResults(
            setting=setting,
            idle=seen[False],
            loaded=seen[True] if processes else {},
            host_us=host_us,
            bare_ms=median(bare_ms[False]),
            nodes=bare.nodes(),
        ).publish(results)
        expected = engines["v2"].outputs
        for name, engine in engines.items():
            differ = sum(
                a[: len(b)] != b[: len(a)] for a, b in zip(engine.outputs, expected, strict=True)
            )
            results.add(f"{setting}, {name}: requests with other tokens than v2", differ, "")
            if differ:
                print(f"  {name}: {differ} requests have other tokens than in v2", flush=True)


def count_calls(results: Results, *, setting: Setting, steps: int) -> None:
    """Count the calls of the CUDA API per step of each variant."""
    print(f"\n{setting}: calls of the CUDA API per step", flush=True)
    for name, variant in VARIANTS.items():
        with measured_engine(setting, variant, results.device) as engine:
            calls = engine.cuda_calls(steps)
        results.add(f"{setting}, {name}: CUDA calls", sum(calls.values()), "per step")
        for call, count in calls.items():
            results.add(f"{setting}, {name}: {call}", count, "per step")
        parts = ", ".join(f"{call} {count:.2f}" for call, count in calls.items())
        print(f"{name:12}{sum(calls.values()):7.2f}: {parts}", flush=True)


def measure_rivals(results: Results, *, end: float) -> None:
    """Measure transformers in another process, until ``end`` at the latest."""
    script = Path(__file__).with_name("transformers_generate.py")
    command = [sys.executable, str(script), "--device", results.device.type]
    seconds = max(1.0, min(_RIVALS_S, end - time.monotonic()))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nstopped after {seconds:.0f} s"
    print("", flush=True)
    for line in out.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            name, speed = f"transformers, {found['name']}", found["tokens per second"]
            results.add(f"one request, {name}: tokens", speed, "tokens/s")
            print(f"{name}: {speed:.1f} tokens/s", flush=True)
    if process.returncode:
        raise RuntimeError((err.strip().splitlines() or ["transformers failed"])[-1])


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a section failed."""
    options = _parser().parse_args(argv)
    processes = 0 if options.skip_load else 2 * (os.cpu_count() or 1)
    settings: dict[str, int | str] = {
        "algorithm": "EAGLE",
        "steps per round": options.steps,
        "least launches per round": _ROUND_LAUNCHES,
        "rounds": options.rounds,
        "busy processes": processes,
    }
    results = Results(resolve_device(options.device), settings, options.out)
    end = time.monotonic() + options.seconds
    with torch.no_grad():
        for name, measure in _sections(options, results.device.type, processes, end):
            if time.monotonic() > end:
                results.settings["not measured from"] = name
                print(f"stopped after {options.seconds:.0f} s, before {name}", flush=True)
                break
            results.run(name, measure)
    results.write()
    report = results.report()
    judged = tuple(measure for measure in report.measures if measure.bar is not None)
    Console(width=120).print(bench_view(replace(report, measures=judged)))
    return 1 if results.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (1 8 32)"
    )
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 4], help="drafts (1 4)")
    parser.add_argument("--steps", type=int, default=64, help="least steps of a round (64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each variant (3)")
    parser.add_argument(
        "--seconds", type=float, default=270, help="start no section after this time (270)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--skip-load", action="store_true", help="measure an idle host only")
    parser.add_argument("--skip-rivals", action="store_true", help="leave transformers out")
    return parser


def _sections(
    options: argparse.Namespace, device: str, processes: int, end: float
) -> Iterator[tuple[str, Callable[[Results], None]]]:
    """Yield the name of each section and the function that measures it."""
    measure = partial(
        measure_setting, steps=options.steps, rounds=options.rounds, processes=processes
    )
    for size in options.batch_sizes:
        for topk in options.topk:
            setting = Setting(size, topk)
            yield str(setting), partial(measure, setting=setting)
    if device == "cuda":
        for topk in options.topk:
            setting = Setting(options.batch_sizes[0], topk)
            yield f"calls of {setting}", partial(count_calls, setting=setting, steps=options.steps)
    if not options.skip_rivals:
        yield "transformers", partial(measure_rivals, end=end)


if __name__ == "__main__":
    sys.exit(main())
