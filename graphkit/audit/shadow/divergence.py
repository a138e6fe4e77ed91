"""First node at which a wrong graph differs from a new capture of the same step and size.

Both should consist of the same nodes with the same arguments, and compute the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from graphkit.audit.audit_log import NotChecked
from graphkit.audit.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.audit.capture_differences import (
    CaptureDifference,
    capture_differences,
    differing_bytes,
    location,
)
from graphkit.audit.node_switches import Nodes
from graphkit.audit.recaptures import Recaptures
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.forward_trace import Weights
from graphkit.audit.shadow.first_results import first_memory_difference, first_result_difference
from graphkit.graphs import (
    UNSET_MARKER,
    Attribution,
    Backend,
    CapturedGraph,
    CudaBackend,
    NamedTensors,
    inspect_graph,
)
from graphkit.records import Node, Pointer
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import Tensors, even_owner, first_difference

_EQUAL = "A new capture replays alike: the step itself behaves differently while it is captured."
CanonicalNodes = Sequence[CanonicalNode]
_ArgumentDifference = tuple[int, str]
"""Index of the first node whose kind or arguments differ, and the difference as a sentence."""
Divergence = tuple[str, Node | None]
"""A difference as a sentence, and the node of the new capture that differs, if there is one."""


def first_divergence(runs: EqualStateRuns, weights: Weights) -> Divergence:
    """Capture a size again, next to the runner's graph, and find the first node that differs.

    Runs the forward. Leaves state and random numbers changed.
    """
    runner, size = runs.runner, runs.padded_batch_size
    names = runner.memory_names(weights)
    graph = runner.graphs[size]
    is_recorded = runner.backend.name == "recorder"
    runs.start.restore()
    recaptures = Recaptures(
        runner,
        weights=weights,
        batch_sizes=[other for other in runner.table if other >= size],  # as the runner captured
        backend=_new_pool(runner.backend),
    )
    others = () if is_recorded else _other_captures(recaptures, size, names)
    with recaptures.captured(attribution=Attribution(weights)) as graphs:
        new = graphs[size]
        before, after = (inspect_graph(captured, names=names).nodes for captured in (graph, new))
        captures = [canonical_nodes(new, names), *others]
        differences = list(_common_differences(canonical_nodes(graph, names), captures))
        argument = _first_argument(differences, before, after)
        if is_recorded:
            return _earlier(argument, first_result_difference(graph, new, runs.replay), after)
        try:
            result = _first_memory_difference(runner, (graph, new), (before, after), runs.replay)
        except NotChecked as error:
            if argument is not None:
                return _earlier(argument, None, after)
            return f"A new capture has the same nodes; {error}.", None
        if result is not None:  # different arguments of earlier nodes did not change any result
            later = (difference for difference in differences if difference.node >= result)
            argument = _first_argument(later, before, after)
        return _earlier(argument, result, after)


def _first_memory_difference(
    runner: Runner[Any, Any],
    graphs: tuple[CapturedGraph, CapturedGraph],
    nodes: tuple[Nodes, Nodes],
    replay: Callable[[CapturedGraph], Tensors],
) -> int | None:
    """Return the first node that leaves different memory, beyond rounding if the outputs do."""
    got, expected = (replay(graph) for graph in graphs)
    dtype = runner.sizes.dtype
    rounding = Rounding(dtype)
    beyond = first_difference(expected, got, even_owner(1), rounding, rounding.most)
    if beyond is not None and dtype.itemsize <= 4:
        index = first_memory_difference(graphs, nodes, replay, runner.device, dtype)
        if index is not None:
            return index
    return first_memory_difference(graphs, nodes, replay, runner.device)


def _earlier(argument: _ArgumentDifference | None, result: int | None, nodes: Nodes) -> Divergence:
    """Return the earlier one: a node with different arguments, or one with different results."""
    if result is not None and (argument is None or result < argument[0]):
        node = nodes[result]
        text = (
            f"Node {node.index} ({node.short_name}) is the first with different results in a new "
            "capture, although its arguments are equal: memory that it reads, or its code, was "
            "replaced."
        )
        return text, node
    if argument is None:
        return _EQUAL, None
    index, text = argument
    return text, nodes[index] if index < len(nodes) else None


def _first_argument(
    differences: Iterable[CaptureDifference], before: Nodes, after: Nodes
) -> _ArgumentDifference | None:
    """Return the first difference of nodes and arguments that has a meaning."""
    for difference in differences:
        is_of_node = difference.what != "number of nodes"
        one, other = (
            _pointer(nodes[difference.node], difference) if is_of_node else None
            for nodes in (before, after)
        )
        if one and other and one.memory == other.memory == "pool":
            continue  # each graph has its own memory
        earlier = one.name if one else difference.before
        now = other.name if other else difference.after
        text = f"A new capture differs first in {location(difference, after)}: it is {now}; in the "
        return difference.node, f"{text}graph it is {earlier}."
    return None


def _pointer(node: Node, difference: CaptureDifference) -> Pointer | None:
    """Return the pointer that a differing word of an argument belongs to."""
    if difference.argument is None or difference.offset is None:
        return None
    pointers = node.arguments[difference.argument].pointers
    return next((p for p in pointers if p.offset <= difference.offset < p.offset + 8), None)


def _common_differences(
    graph: CanonicalNodes, captures: Sequence[CanonicalNodes]
) -> Iterator[CaptureDifference]:
    """Yield the differences between a graph and each of several new captures.

    Bytes in which the new captures differ from each other have no meaning.
    """
    unset = differing_bytes(*captures)
    first, *others = (list(capture_differences(graph, capture, unset)) for capture in captures)
    places = [{_place(difference) for difference in other} for other in others]
    for difference in first:
        if all(_place(difference) in other for other in places):
            yield difference


def _place(difference: CaptureDifference) -> tuple[int, int | None, int | None]:
    return difference.node, difference.argument, difference.offset


def _other_captures(
    recaptures: Recaptures, size: int, names: NamedTensors
) -> Sequence[CanonicalNodes]:
    """Capture with different values in unset bytes, and once without attribution."""
    nodes = []
    for attribution in (None, Attribution(), Attribution(stack_fill=UNSET_MARKER)):
        with recaptures.captured(attribution=attribution) as graphs:
            nodes.append(canonical_nodes(graphs[size], names))
    return nodes


def _new_pool(backend: Backend) -> Backend:
    """Return a backend with a memory pool of its own; the recorder needs none."""
    if not isinstance(backend, CudaBackend):
        return backend
    new = CudaBackend(backend.device)
    new.stream = backend.stream  # libraries keep a workspace per stream
    return new
