"""Conditions of ``streams.py`` that differ in the streams that capture and replay.

A condition yields the name of a state; the replays are measured at each yield, on the stream that
is current there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from decode_graphs import DecodeGraphs, Graph

States = Iterator[str]


def default_stream_first(graphs: DecodeGraphs) -> States:
    """Begin with the default stream alone: the capture stream runs nothing."""
    capture_stream = torch.cuda.Stream()
    graphs.capture(capture_stream, warm_up_on=torch.cuda.default_stream())
    yield "default alone"
    graphs.run_kernel(capture_stream)
    yield "and the capture's"
    for name in ("a third", "a fourth"):
        graphs.run_kernel(torch.cuda.Stream())
        yield name


def without_default_stream(graphs: DecodeGraphs) -> States:
    """Run everything on one stream of torch's pool, and use the default stream last."""
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        graphs.capture(own)
        yield "one stream"
        for name in ("a second", "a third"):
            graphs.run_kernel(torch.cuda.Stream())
            yield name
        graphs.run_kernel(torch.cuda.default_stream())
        yield "and the default"


def replayed_on_capture_stream(graphs: DecodeGraphs) -> States:
    """Replay on the capture stream; the default stream has only made the weights."""
    stream = torch.cuda.Stream()
    graphs.capture(stream)
    with torch.cuda.stream(stream):
        yield "before"
        graphs.run_kernel(torch.cuda.Stream())
        yield "one more"


def replayed_on_third_stream(graphs: DecodeGraphs) -> States:
    """Move the replays to a further stream."""
    graphs.capture()
    yield "on the default"
    with torch.cuda.stream(torch.cuda.Stream()):
        yield "on a third"
    yield "on the default again"


def used_before_capture(graphs: DecodeGraphs) -> States:
    """Use the further stream before the graphs exist."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    graphs.capture()
    yield "used before"


def instantiated_after(graphs: DecodeGraphs) -> States:
    """Instantiate, upload and capture again after the further stream was used."""
    graphs.capture()
    yield "before"
    graphs.run_kernel(torch.cuda.Stream())
    yield "one more"
    for graph in graphs.graphs.values():
        graph.instantiate()
    yield "instantiated again"
    for graph in graphs.graphs.values():
        graph.upload()
    torch.cuda.synchronize()
    yield "uploaded again"
    graphs.capture()
    yield "captured again"


def graph_with_branches(graphs: DecodeGraphs) -> States:
    """Launch another graph with branches. The streams that capture them run no kernel."""

    def branched() -> None:
        first = torch.cuda.current_stream()
        for branch in branches:
            branch.wait_stream(first)
            with torch.cuda.stream(branch):
                graphs.word.add_(1)
        for branch in branches:
            first.wait_stream(branch)

    graphs.capture()
    yield "before"
    for count in (2, 8):
        branches = [torch.cuda.Stream() for _ in range(count)]
        Graph(branched, torch.cuda.Stream()).launch()
        torch.cuda.synchronize()
        yield f"{count} branches"
