"""Time between the ends of the kernels of a decoder layer, as CUPTI records them.

The kernels of a layer overlap: each starts while the one before it runs. Their durations contain
that wait, and the times between their ends add up to the time of the layer. The layers are those of
``linear_chain.py``, replayed as a graph.

    python tools/bench/layer_timeline.py --out tools/bench/results/layer_timeline.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from linear_layers import COUNT, Chain, by_op, make_layers
from quantized_linear import LAYERS, random_inputs
from timing import publish
from torch.profiler import ProfilerActivity, profile

from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

FORMATS, ROWS = ("linear", "fp8 channel", "int4"), (6, 48)
"""Kinds of weights, and rows: those of one and of eight requests with 5 drafts."""


class Kernel(NamedTuple):
    """A kernel that CUPTI recorded: its name, and when it ended in microseconds."""

    name: str
    end_us: float


def recorded(graph: torch.cuda.CUDAGraph, replays: int, device: torch.device) -> list[Kernel]:
    """Return the kernels of so many replays in the order of their ends."""
    graph.replay()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize(device)
    events = (event for event in profiler.events() if event.name.endswith("_kernel"))
    return sorted(
        (Kernel(each.name, each.time_range.end) for each in events), key=lambda k: k.end_us
    )


def ends_of_a_layer(kernels: Sequence[Kernel], replays: int, layers: int) -> list[Kernel]:
    """Return the kernels of a layer, each with the median time since the end of the one before.

    Args:
        kernels: Those of all replays. A replay has ``layers`` times those of a layer, after a norm.
        replays: Number of replays; the first, and the first layer of each, do not count.
        layers: Layers of a replay.

    Raises:
        ValueError: The kernels do not repeat as the layers do.
    """
    of_replay, rest = divmod(len(kernels), replays)
    of_layer, others = divmod(of_replay - 1, layers)
    if rest or others:
        raise ValueError(f"{len(kernels)} kernels are not those of {replays} x {layers} layers.")
    found = []
    for place in range(of_layer):
        first = range(of_replay, len(kernels), of_replay)
        places = [
            replay + 1 + layer * of_layer + place for replay in first for layer in range(1, layers)
        ]
        names = {kernels[each].name for each in places}
        if len(names) > 1:
            raise ValueError(f"Kernel {place} of a layer is one of {sorted(names)}.")
        times = (kernels[each].end_us - kernels[each - 1].end_us for each in places)
        found.append(Kernel(names.pop(), median(times)))
    return found


def timeline(replays: int, device: torch.device) -> Iterator[Measure]:
    """Measure the kernels of a layer for each kind of weight and number of rows."""
    for kind in FORMATS:
        layers = make_layers(LAYERS, kind, COUNT, device)
        for count in ROWS:
            run = partial(
                Chain(layers, random_inputs(LAYERS["qkv"], count, device)[1]).run,
                partial(by_op, kind=kind),
            )
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            setting = f"{kind}, {count} rows"
            kernels = ends_of_a_layer(recorded(graph, replays, device), replays, COUNT)
            for place, (name, us) in enumerate(kernels, 1):
                variant = f"{place}. {name.removesuffix('_kernel')}"
                yield Measure(name="time", value=us, unit="us", setting=setting, variant=variant)
            total = sum(each.end_us for each in kernels)
            yield Measure(name="time", value=total, unit="us", setting=setting, variant="layer")


def report(rounds: int, device: torch.device) -> BenchReport:
    """Measure the layers of ``FORMATS`` for ``ROWS`` rows, in so many replays.

    Raises:
        SystemExit: The device is not a CUDA device.
    """
    if device.type != "cuda":
        raise SystemExit("layer_timeline.py needs a CUDA device, whose kernels CUPTI records.")
    return BenchReport(
        name="kernels of a decoder layer",
        environment=environment(device),
        settings={"replays": rounds, "layers": COUNT},
        measures=tuple(timeline(rounds, device)),
    )


if __name__ == "__main__":
    sys.exit(publish(__doc__ or "", 6, report, None, has_device=True))
