"""GPU time of replays by what the process did before, and what changes it later.

The same graphs take one of two times on an H200 with driver 580: layers of an 8B model 5.72 or 6.18
ms, 1,000 tiny kernels 0.96 or 1.14 ms. A process gets slow when about ten kernels have run in it
without a graph on a stream other than its first. Fewer have no effect. Neither does it matter which
kernels they are, where the process captures and replays, or what it copies and allocates. A second
context makes it fast again, even if it is destroyed at once, until kernels run on another stream.

The conditions, see ``stream_conditions.py``, look for the rule, check that graphkit stays fast, and
look for what slows a fast process and for what repairs a slow one. Each runs in a process of its
own, about 5 s. The report is written after each.

    python tools/bench/streams.py --out tools/bench/results/streams.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from decode_graphs import CLOCK_CYCLES, LAYERS, PLAIN_KERNELS, ROWS
from report_file import add_out, write_report
from stream_conditions import CONDITIONS, measured

from graphkit.graphs import environment
from graphkit.graphs.devices import driver_version
from graphkit.records import BenchReport, Measure

_LIMIT_S = 60
"""Time limit of one process."""
MsByState = dict[str, Mapping[str, float]]
"""Milliseconds per replay by state and graph; ``host`` is the time of the act before a state."""


@dataclass
class Results:
    """What was measured so far.

    Attributes:
        replays: Replays of each graph in each state.
        device: Name of the GPU; empty before the first result.
        nodes: Number of nodes of each graph, as of the first condition.
        ms: Times of the conditions, by name.
        failed: Errors of the conditions that did not reach their last state, by name.
    """

    replays: int
    device: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    ms: dict[str, MsByState] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def report(self, chosen: Sequence[str]) -> BenchReport:
        """Return the report. This process makes no CUDA context, which could change the times."""
        missing = [name for name in chosen if name not in self.ms and name not in self.failed]
        settings: dict[str, int | str] = {
            "layers": LAYERS,
            "rows": ROWS,
            "cycles of clock": CLOCK_CYCLES,
            "kernels of plain": PLAIN_KERNELS,
            "replays": self.replays,
            **{f"nodes of {name}": count for name, count in self.nodes.items()},
            **{f"failed: {name}": error for name, error in self.failed.items()},
        }
        if missing:
            settings["not measured"] = ", ".join(missing)
        versions = environment(torch.device("cpu"))
        return BenchReport(
            name="streams: replays of a decode step by what the process did before",
            environment=replace(versions, device=self.device, driver=driver_version()),
            settings=settings,
            measures=tuple(self._measures()),
        )

    def _measures(self) -> Iterator[Measure]:
        for name, states in self.ms.items():
            for state, times in states.items():
                for graph, ms in times.items():
                    yield Measure(name=f"{name}: {state}: {graph}", value=ms, unit="ms")


def run_condition(name: str, replays: int, results: Results) -> None:
    """Measure a condition in a new process, and add its times or its error to the results."""
    command = [sys.executable, __file__, "--condition", name, "--replays", str(replays)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        results.failed[name] = f"took more than {_LIMIT_S} s"
        return
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        results.failed[name] = lines[-1]
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            results.device, results.nodes = found["device"], results.nodes or found["nodes"]
            results.ms.setdefault(name, {})[found["state"]] = found["ms"]


def print_condition(name: str, results: Results) -> None:
    """Print a line per state: milliseconds of each graph, and over those of the first condition."""
    for state, times in results.ms.get(name, {}).items():
        first = next(iter(next(iter(results.ms.values())).values()))
        cells = [f"{graph} {ms:.3f} ({ms / first[graph]:.3f}x)" for graph, ms in times.items()]
        print(f"{name:31}{state:21}{'  '.join(cells)}", flush=True)
    if name in results.failed:
        print(f"{name}: failed: {results.failed[name]}", flush=True)


def run_conditions(chosen: Sequence[str], replays: int, seconds: float, out: Path | None) -> int:
    """Measure conditions until the time is over, and return the exit code."""
    results, end = Results(replays), time.monotonic() + seconds
    for name in chosen:
        if time.monotonic() > end:
            print(f"stopped after {seconds:.0f} s", flush=True)
            break
        run_condition(name, replays, results)
        print_condition(name, results)
        write_report(results.report(chosen), out)
    return 1 if results.failed else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--replays", type=int, default=20, help="replays per measurement (20)")
    parser.add_argument(
        "--seconds", type=float, default=120, help="start no condition after this time (120)"
    )
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, metavar="NAME", help="conditions")
    parser.add_argument("--condition", choices=CONDITIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.condition is not None:
        with torch.no_grad():
            for state in measured(options.condition, options.replays):
                print(json.dumps(state), flush=True)
        return 0
    return run_conditions(
        options.only or list(CONDITIONS), options.replays, options.seconds, options.out
    )


if __name__ == "__main__":
    sys.exit(main())
