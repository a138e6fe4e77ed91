"""Cost of inspecting a graph: attribution during capture, the graph walk, and timing of nodes.

The graph is the reference model's TARGET_VERIFY. The walk is compared with the two ways in which
torch shows the kernels of a graph: ``debug_dump`` (names and grids) and a profiler trace.

    python tools/bench/sight.py --out tools/bench/results/sight.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from timing import Variant, host_us, publish
from torch.profiler import ProfilerActivity, profile

import graphkit as gk
from graphkit.graphs import environment
from graphkit.graphs.walk.driver_nodes import DriverWalk
from graphkit.models.reference import reference_target
from graphkit.records import BenchReport, GraphRecord, Measure, Node
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

DEVICE = torch.device("cuda", 0)
MODE, SIZE = gk.ForwardMode.TARGET_VERIFY, 8


def runner_of(target: CaptureTarget, *, attributed: bool) -> tuple[Runner, float]:
    """Return a captured runner and its capture time in milliseconds, warm-ups included."""
    runner = target.runner(MODE, batch_sizes=[SIZE], device=DEVICE, backend=gk.CudaBackend(DEVICE))
    attribution = gk.Attribution(target.weights) if attributed else None
    return runner, runner.capture(attribution=attribution).sizes[0].capture_ms


def ms(act: Callable[[], object], rounds: int) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


def capture_ms(target: CaptureTarget, rounds: int) -> dict[bool, float]:
    """Return the median milliseconds of captures with and without attribution, alternating."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for attributed, each in times.items():
            runner, took = runner_of(target, attributed=attributed)
            runner.close()
            each.append(took)
    return {attributed: median(each) for attributed, each in times.items()}


def torch_baselines(runner: Runner, batch: object, rounds: int) -> Iterator[Measure]:
    """Measure what torch offers; both write files, because they have no other output."""
    graph = runner.backend.pool.graphs.copy().pop().graph
    with tempfile.TemporaryDirectory() as folder:
        drawing, trace = f"{folder}/graph.dot", f"{folder}/trace.json"

        def profiled() -> None:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                runner.replay(batch)
                torch.cuda.synchronize()
            profiler.export_chrome_trace(trace)

        yield Measure(
            name="rival: debug_dump", value=ms(lambda: graph.debug_dump(drawing), rounds), unit="ms"
        )
        yield Measure(name="rival: profiler trace", value=ms(profiled, rounds), unit="ms")


def replay_us(target: CaptureTarget, batch: object) -> dict[str, float]:
    """Return the host microseconds of a replay, captured with and without attribution."""
    variants = {}
    for attributed in (False, True):
        runner, _ = runner_of(target, attributed=attributed)
        variants[str(attributed)] = Variant(lambda _, r=runner: r.replay(batch))
    return host_us(variants, 3)


def measures(rounds: int) -> Iterator[Measure]:
    """Yield all measures of the report."""
    target = reference_target(DEVICE, max_batch_size=SIZE)
    batch = target.batch(MODE, SIZE, 1)
    runner, _ = runner_of(target, attributed=True)
    graph = runner.backend.pool.graphs.copy().pop().graph
    record = runner.inspect(SIZE, weights=target.weights)
    kernels = [node for node in record.nodes if node.kind == "kernel"]

    def inspect() -> GraphRecord:
        return runner.inspect(SIZE, weights=target.weights)

    def inspect_and_time() -> GraphRecord:
        return runner.inspect(SIZE, weights=target.weights, replay=lambda: runner.replay(batch))

    # Using the profiler slows down all later launches, so it runs last.
    captures, replays, walked = (
        capture_ms(target, rounds),
        replay_us(target, batch),
        ms(inspect, rounds),
    )
    text = inspect_and_time().to_json()
    yield Measure(name="nodes", value=len(record.nodes), unit="")
    yield Measure(
        name="kernels in no module", value=share(kernels, _has_no_module), unit="", bar=0.01
    )
    yield Measure(
        name="nodes with unreadable arguments",
        value=share(kernels, _has_unreadable_argument),
        unit="",
        bar=0,
    )
    walk = ms(lambda: DriverWalk(graph.raw_cuda_graph()), rounds)
    yield Measure(
        name="walk, per 200 nodes", value=walk / len(record.nodes) * 200, unit="ms", bar=10
    )
    yield Measure(name="inspect: walk, names, record", value=walked, unit="ms")
    yield Measure(name="inspect with 20 replays measured", value=ms(inspect_and_time, 5), unit="ms")
    yield Measure(name="record to JSON", value=ms(record.to_json, rounds), unit="ms")
    yield Measure(
        name="record from JSON", value=ms(lambda: GraphRecord.from_json(text), rounds), unit="ms"
    )
    yield from torch_baselines(runner, batch, rounds)
    yield Measure(name="capture", value=captures[False], unit="ms")
    yield Measure(name="capture with attribution", value=captures[True], unit="ms")
    yield Measure(
        name="attribution, per node",
        value=(captures[True] - captures[False]) * 1e3 / len(record.nodes),
        unit="us",
    )
    yield Measure(name="host: replay", value=replays["False"], unit="us")
    yield Measure(name="host: replay, captured with attribution", value=replays["True"], unit="us")


def share(nodes: list[Node], condition: Callable[[Node], bool]) -> float:
    """Return the share of nodes that satisfy a condition."""
    return sum(map(condition, nodes)) / len(nodes)


def _has_no_module(node: Node) -> bool:
    return not node.module


def _has_unreadable_argument(node: Node) -> bool:
    return any(argument.kind == "unreadable" for argument in node.arguments)


def report(rounds: int) -> BenchReport:
    """Run the benchmark and return its report."""
    return BenchReport(
        name="sight: cost of inspecting a graph",
        environment=environment(DEVICE),
        settings={"mode": MODE.name, "size": SIZE, "rounds": rounds},
        measures=tuple(measures(rounds)),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 15, report, argv)


if __name__ == "__main__":
    sys.exit(main())
