"""Time that an audit of foreign graphs adds to a program: between checks, and for one check.

The program replays one graph, which reads weights and writes a row of a cache in place. Replays
without an audit and with one take turns in the same process. A check is the one with poisoned
memory, which copies, repeats and restores; the program waits for it. Captures are the first one
under the audit, and another one that reads the same memory.

    python tools/bench/foreign_audit.py --out tools/bench/results/foreign_audit.json
    python tools/bench/foreign_audit.py --device cpu --nodes 12 --gigabytes 0.002

``--device cpu`` runs on the stand-in device of the tests, whose times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report_file import add_out
from timing import show

from graphkit.audit.foreign import AuditOptions
from graphkit.audit.foreign.audits.device import CudaDevice
from graphkit.audit.foreign.audits.program_audit import ProgramAudit
from graphkit.audit.foreign.hooks import observe_captures, observe_replays
from graphkit.records import BenchReport, Measure

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

CHECK_SECONDS_BAR, RATIO_BAR = 2.0, 1.02
"""Largest time of one check, and of replays between checks over replays without an audit."""
WEIGHT_PART = 0.5
"""Part of the memory that holds weights; the rest is the cache."""
WIDTH = 2048
CALLS = 200
NEVER = 10**9
"""A number of replays that the benchmark does not reach."""


class Program(ABC):
    """A program whose graph reads weights, one node each, and writes a row of a cache."""

    device: Any
    graph_class: type

    @abstractmethod
    def subclass(self) -> type:
        """Return another class of graphs, which can be hooked on its own."""

    @abstractmethod
    def capture(self, graph: Any) -> None:
        """Capture the step."""


class CudaProgram(Program):
    """The program on a GPU.

    Args:
        nodes: Number of nodes to aim at.
        num_bytes: Bytes of weights and cache.
    """

    graph_class = torch.cuda.CUDAGraph

    def __init__(self, nodes: int, num_bytes: int) -> None:
        self.device = CudaDevice.current()
        rows = max(int(WEIGHT_PART * num_bytes / nodes / WIDTH / 2), 1)
        kinds = {"dtype": torch.bfloat16, "device": "cuda"}
        self.weights = [torch.full((rows, WIDTH), 0.001, **kinds) for _ in range(nodes)]
        self.cache = torch.zeros(int((1 - WEIGHT_PART) * num_bytes / WIDTH / 2), WIDTH, **kinds)
        self.x = torch.ones(WIDTH, **kinds)
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def subclass(self) -> type:
        """Return a subclass of ``torch.cuda.CUDAGraph``."""
        return type("Graph", (torch.cuda.CUDAGraph,), {})

    def capture(self, graph: Any) -> None:
        """Capture one product for each weight, and the write."""

        def step() -> torch.Tensor:
            for weight in self.weights:
                out = torch.mv(weight, self.x)
            self.cache.index_copy_(0, self.position, out.new_ones(1, WIDTH))
            return out

        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.out = step()


class StandInProgram(Program):
    """The program on the stand-in device of the tests."""

    def __init__(self, nodes: int, num_bytes: int) -> None:
        from stand_in_device import StandInDevice

        self.device = StandInDevice(num_pools=8)
        self.graph_class = self.device.graph_class()
        size = max(int(WEIGHT_PART * num_bytes / nodes / 4), 1)
        self.weights = [self.device.full(size, value=0.001) for _ in range(nodes)]
        self.cache = self.device.full(int((1 - WEIGHT_PART) * num_bytes / 4), value=0)

    def subclass(self) -> type:
        """Return another class of graphs of the device."""
        return self.device.graph_class()

    def capture(self, graph: Any) -> None:
        """Launch one sum for each weight, and the write."""
        graph.capture_begin()
        self.out = self.device.empty(1)
        for weight in self.weights:
            self.device.launch("sum", lambda out, w: out.copy_(w.sum()), self.out, weight)
        self.device.launch("write", lambda c, out: c[:1].copy_(out), self.cache, self.out)
        graph.capture_end()


def replay_us(program: Program, graphs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return host and whole microseconds per replay of each graph; the graphs take turns.

    The host's time is that of one replay from an idle device, the whole time that of replays one
    after the other.
    """
    times: dict[str, list[list[float]]] = {name: [[], []] for name in graphs}
    synchronize = program.device.synchronize
    for _ in range(rounds):
        for name, graph in graphs.items():
            host = []
            for _ in range(CALLS):
                synchronize()
                began = time.perf_counter()
                graph.replay()
                host.append(time.perf_counter() - began)
            synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                graph.replay()
            synchronize()
            times[name][0].append(median(host) * 1e6)
            times[name][1].append((time.perf_counter() - began) / CALLS * 1e6)
    return {name: [median(host), median(whole)] for name, (host, whole) in times.items()}


def followed_class(program: Program, **options: Any) -> tuple[type, ProgramAudit]:
    """Return a class of graphs that an audit follows, and the audit."""
    report = Path(tempfile.gettempdir()) / "unused.json"
    audit = ProgramAudit(AuditOptions(report=report, **options), None, lambda: program.device)
    graph_class = program.subclass()
    observe_captures(graph_class, audit.new_capture)
    observe_replays(graph_class, lambda: audit)
    return graph_class, audit


def seconds(program: Program, call: Any) -> float:
    """Return the seconds of a call, from an idle device to an idle device."""
    program.device.synchronize()
    began = time.perf_counter()
    call()
    program.device.synchronize()
    return time.perf_counter() - began


def measures(program: Program, rounds: int) -> Iterator[Measure]:
    """Yield all measures of the report."""
    plain = program.graph_class()
    program.capture(plain)
    plain.replay()
    captures = {"no audit": seconds(program, lambda: program.capture(program.graph_class()))}
    graph_class, audit = followed_class(program, every=0)
    followed = graph_class()
    captures["audit"] = seconds(program, lambda: program.capture(followed))
    captures["audit, known memory"] = seconds(program, lambda: program.capture(graph_class()))
    for variant, took in captures.items():
        yield Measure(name="capture", variant=variant, setting="program", value=took, unit="s")

    checks = [seconds(program, followed.replay)]
    every_class, every = followed_class(program, every=1)
    checked = every_class()
    program.capture(checked)
    checks += [seconds(program, checked.replay) for _ in range(rounds)]
    pointers = [seconds(program, followed.replay), seconds(program, plain.replay)]
    for graph in audit.graphs:
        graph.next_check = NEVER
    times = replay_us(program, {"no audit": plain, "audit": followed}, rounds)
    for variant, (host, whole) in times.items():
        yield Measure(name="host", variant=variant, setting="program", value=host, unit="us")
        yield Measure(name="replay", variant=variant, setting="program", value=whole, unit="us")
    ratio = times["audit"][1] / times["no audit"][1]
    yield Measure(name="audit / no audit", value=ratio, unit="x", bar=RATIO_BAR)

    (graph,) = audit.graphs
    yield Measure(name="nodes", value=len(graph.record.nodes), unit="")
    yield Measure(name="first check", value=checks[0], unit="s", bar=CHECK_SECONDS_BAR)
    yield Measure(name="one check", value=median(checks[1:]), unit="s", bar=CHECK_SECONDS_BAR)
    added = (pointers[0] - pointers[1]) * 1e3
    yield Measure(name="check of pointers alone", value=added, unit="ms")
    found = [*audit.results.current().checks, *every.results.current().checks]
    missing = sum(check.text.startswith("not checked") for check in found)
    yield Measure(name="checks not done", value=missing, unit="", bar=0)
    errors = [*audit.results.current().findings, *every.results.current().findings]
    errors = [finding for finding in errors if finding.severity == "error"]
    yield Measure(name="errors", value=len(errors), unit="", bar=0)
    for check in found:
        print(f"{check.audit}: {check.text}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--nodes", type=int, default=500, help="nodes of the graph (500)")
    parser.add_argument(
        "--gigabytes", type=float, default=20.0, help="weights and cache, in GB (20)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="repetitions (5)")
    add_out(parser)
    options = parser.parse_args(argv)
    kind = CudaProgram if options.device == "cuda" else StandInProgram
    with torch.no_grad():
        program = kind(options.nodes, int(options.gigabytes * 1e9))
        found = tuple(measures(program, options.rounds))
    report = BenchReport(
        name="foreign_audit: time that an audit of foreign graphs adds to a program",
        environment=program.device.environment(),
        settings={
            "device": options.device, "nodes": options.nodes, "gigabytes": f"{options.gigabytes:g}",
            "rounds": options.rounds,
        },
        measures=found,
    )  # fmt: skip
    return int(show(report, options.out))


if __name__ == "__main__":
    sys.exit(main())
