"""Where a graph begins to differ from a capture made now.

Both are the same step at the same size, so they should consist of the same nodes, each given the
same and making the same of it. The first node of which that is not so is where to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphkit.audit.moment import Moment
from graphkit.audit.rerun import Rerun
from graphkit.audit.shadow.op_steps import first_other_result
from graphkit.audit.shadow.prefixes import Incomparable, first_other_memory
from graphkit.graphs import (
    UNSET_MARKER,
    Attribution,
    CapturedGraph,
    CudaBackend,
    SizeTable,
    inspect_graph,
)
from graphkit.graphs.walk import NamedTensors
from graphkit.graphs.walk.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.graphs.walk.capture_differences import (
    CaptureDifference,
    capture_differences,
    differing_bytes,
)
from graphkit.records import Node, Pointer
from graphkit.runners import Runner
from graphkit.runners.capturing import Capturing
from graphkit.targets.compare import first_difference, tolerance

_ALIKE = (
    "A capture made now replays alike: the step itself does something else when it is captured."
)
Image = Sequence[CanonicalNode]
Place = tuple[int, str]
"""Index of a node, and what is different there, as a sentence."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a graph begins to differ from a capture made now.

    Attributes:
        text: What is different, as a sentence.
        node: The first node of which that is so, as it is captured now; ``None`` if there is none.
    """

    text: str
    node: Node | None = None


def first_divergence(
    runner: Runner[Any],
    batch: Any,
    size: int,
    moment: Moment,
    weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
) -> Divergence:
    """Capture a size again, aside, and find the first node that differs.

    Runs the forward, and leaves state and random numbers changed.

    Args:
        runner: Captured; nothing else may be replayed meanwhile.
        batch: A live batch that its graph goes wrong with.
        size: The graph's.
        moment: What every run begins with.
        weights: To name nodes by.
    """
    graph = runner.replayer("a bisection").graphs[size]
    names, rerun = runner.memory_names(weights), Rerun(runner, batch, size, moment)
    is_recorded = runner.backend.name == "recorder"
    moment.put_back()
    others = () if is_recorded else _others(runner, size, names)
    with _captured_now(runner, size, Attribution(weights)) as now:
        before, after = (inspect_graph(each, names=names).nodes for each in (graph, now))
        given = list(_given(canonical_nodes(graph, names), [canonical_nodes(now, names), *others]))
        told = _first_told(given, before, after)
        if is_recorded:
            return _earlier(told, first_other_result(graph, now, rerun), after)
        try:
            found = _first_other_memory(runner, (graph, now), (before, after), rerun)
        except Incomparable as error:
            alike = Divergence(f"A capture made now has the same nodes; {error}.")
            return alike if told is None else _earlier(told, None, after)
        if found is not None:  # what was given to the nodes before it makes no difference
            told = _first_told((each for each in given if each.node >= found), before, after)
        return _earlier(told, found, after)


def _first_other_memory(
    runner: Runner[Any],
    graphs: tuple[CapturedGraph, CapturedGraph],
    nodes: tuple[Sequence[Node], Sequence[Node]],
    rerun: Rerun,
) -> int | None:
    """Look for a difference of the same kind as that of the results: large, or of some bits."""
    made, expected = (rerun(graph).clone().tensors() for graph in graphs)
    far = first_difference(expected, made, tolerance(expected), lambda row, _rows: row)
    found = None
    if far is not None and runner.sizes.dtype.itemsize <= 4:
        found = first_other_memory(graphs, nodes, rerun, runner.device, runner.sizes.dtype)
    return found if found is not None else first_other_memory(graphs, nodes, rerun, runner.device)


def _earlier(told: Place | None, found: int | None, nodes: Sequence[Node]) -> Divergence:
    """What comes first: a node that is given something else, or one that makes something else."""
    if found is not None and (told is None or found < told[0]):
        node = nodes[found]
        return Divergence(
            f"Given the same, node {node.index} ({node.short_name}) is the first to make something "
            "else in a capture made now: what it reads was replaced since, or its code.",
            node,
        )
    if told is None:
        return Divergence(_ALIKE)
    return Divergence(told[1], nodes[told[0]] if told[0] < len(nodes) else None)


def _first_told(
    found: Iterable[CaptureDifference], before: Sequence[Node], after: Sequence[Node]
) -> Place | None:
    """The first node that is another one, or is given something else."""
    for each in found:
        if each.what == "number of nodes":
            text = f"A capture made now has {each.after} nodes, and the graph has {each.before}."
            return each.node, text
        one, other = _lead(before[each.node], each), _lead(after[each.node], each)
        if one and other and one.memory == other.memory == "pool":
            continue  # each graph has memory of its own
        if each.what == "kernel":
            names = after[each.node].short_name, before[each.node].short_name
            text = f"has another node {each.node}: {names[0]} for {names[1]}."
        else:
            values = one.name if one else each.before, other.name if other else each.after
            text = (
                f"differs first in node {each.node} ({after[each.node].short_name}): its "
                f"{_what(after[each.node], each)} is {values[1]}, and {values[0]} in the graph."
            )
        return each.node, f"A capture made now {text}"
    return None


def _lead(node: Node, difference: CaptureDifference) -> Pointer | None:
    """The address of which a differing word of an argument is a part."""
    if difference.argument is None or difference.offset is None:
        return None
    pointers = node.arguments[difference.argument].pointers
    return next((p for p in pointers if p.offset <= difference.offset < p.offset + 8), None)


def _what(node: Node, difference: CaptureDifference) -> str:
    if difference.argument is None:
        return difference.what
    name = f"argument {difference.argument} {node.arguments[difference.argument].name}".rstrip()
    return f"{name} at byte {difference.offset}" if difference.offset else name


def _given(graph: Image, now: Sequence[Image]) -> Iterator[CaptureDifference]:
    """Where a graph is not as captures made now are, every one of them.

    They are of the same, so bytes in which they differ from each other mean nothing.
    """
    unset = differing_bytes(*now)
    first, *others = (list(capture_differences(graph, each, unset)) for each in now)
    places = [{(each.node, each.argument, each.offset) for each in other} for other in others]
    for each in first:
        if all((each.node, each.argument, each.offset) in other for other in places):
            yield each


def _others(runner: Runner[Any], size: int, names: NamedTensors) -> Sequence[Image]:
    """Captures whose unset bytes hold other things; one of them as most graphs are captured."""
    images = []
    for attribution in (None, Attribution(), Attribution(stack_fill=UNSET_MARKER)):
        with _captured_now(runner, size, attribution) as now:
            images.append(canonical_nodes(now, names))
    return images


@contextmanager
def _captured_now(
    runner: Runner[Any], size: int, attribution: Attribution | None
) -> Iterator[CapturedGraph]:
    """A graph of that size, captured as the runner's was: after the larger ones, in a new pool."""
    parts, sizes = runner.parts, [each for each in runner.table if each >= size]
    if isinstance(parts.backend, CudaBackend):
        aside = CudaBackend(runner.device)
        aside.stream = parts.backend.stream  # libraries keep a workspace for each stream
        parts = replace(parts, backend=aside)
    parts = replace(parts, table=SizeTable(sizes[-1], sizes))
    graphs, _ = Capturing(parts, runner.mutable_state, attribution).every_size(lambda _size: None)
    try:
        yield graphs[size]
    finally:
        for graph in graphs.values():
            graph.close()
