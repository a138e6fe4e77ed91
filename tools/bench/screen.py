"""Time of the live screen over a large record: to open it, and to act on it. Needs no GPU.

The record repeats the nodes of tests/data/h200-capture.json, as a model of more layers has them.
A terminal that discards its output takes the place of a real one. Opening starts with the file.

    python tools/bench/screen.py --out tools/bench/results/screen.json
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from timing import publish

from graphkit.graphs import environment
from graphkit.records import (
    BenchReport,
    Edge,
    GraphRecord,
    Measure,
    load_record,
    require_graphs,
)
from graphkit.views.tui import InspectApp
from graphkit.views.tui.screen import PageScreen

SOURCE = Path(__file__).parents[2] / "tests" / "data" / "h200-capture.json"
NUM_NODES, SIZE = 3_000, (120, 40)
Act = Callable[[PageScreen], None]
ACTS: dict[str, Act] = {
    "expand all rows": lambda screen: screen.action_do("open_all"),
    "last row": lambda screen: screen.action_move(1, "end"),
    "one row up": lambda screen: screen.action_move(-1, "row"),
    "one page up": lambda screen: screen.action_move(-1, "page"),
    "timeline": lambda screen: screen.action_view("time"),
    "back": lambda screen: screen.action_back(),
    "kernels": lambda screen: screen.action_view("kernels"),
    "back again": lambda screen: screen.action_back(),
    "memory": lambda screen: screen.action_view("memory"),
}
"""One after the other, each with the drawing that follows."""
BARS = {"open": 1000.0, "one row up": 50.0, "one page up": 50.0}
"""In ms: a second to open, and no delay that can be seen."""


def large_record(num_nodes: int) -> GraphRecord:
    """Return a graph of about that many nodes: those of one graph, again and again as layers."""
    graph = max(require_graphs(load_record(SOURCE)).graphs, key=lambda g: len(g.nodes))
    length = max((node.start_us or 0.0) + (node.duration_us or 0.0) for node in graph.nodes)
    nodes = tuple(
        replace(
            node,
            index=at * len(graph.nodes) + node.index,
            module=node.module.replace("layers.", f"layers.{at}"),
            start_us=at * length + (node.start_us or 0.0),
        )
        for at in range(-(-num_nodes // len(graph.nodes)))
        for node in graph.nodes
    )
    edges = tuple(Edge(source=at, target=at + 1) for at in range(len(nodes) - 1))
    return replace(graph, nodes=nodes, edges=edges)


async def times_ms(path: Path) -> dict[str, float]:
    """Return the milliseconds to open a file and show its first page, and of each act."""
    found = {}
    began = time.perf_counter()
    app = InspectApp(require_graphs(load_record(path)))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        found["open"] = (time.perf_counter() - began) * 1e3
        for name, act in ACTS.items():
            screen = app.screen
            assert isinstance(screen, PageScreen)
            began = time.perf_counter()
            act(screen)
            screen._compositor.render_strips()
            found[name] = (time.perf_counter() - began) * 1e3
            await pilot.pause()
    return found


def report(rounds: int) -> BenchReport:
    """Run the benchmark and return its report."""
    graph = large_record(NUM_NODES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        path.write_text(graph.to_json(), encoding="utf-8")
        runs = [asyncio.run(times_ms(path)) for _ in range(rounds)]
    times = {name: [run[name] for run in runs] for name in runs[0]}
    return BenchReport(
        name="screen: time over a large record",
        environment=environment(torch.device("cpu")),
        settings={"nodes": len(graph.nodes), "terminal": "{}x{}".format(*SIZE), "rounds": rounds},
        measures=tuple(
            Measure(name=name, value=median(each), unit="ms", bar=BARS.get(name))
            for name, each in times.items()
        ),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    return publish(__doc__ or "", 5, report, argv)


if __name__ == "__main__":
    sys.exit(main())
