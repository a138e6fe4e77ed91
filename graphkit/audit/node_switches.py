"""Replay of the first nodes of a graph, and bisection over their number.

Kernels, copies and fills of an executable CUDA graph can be switched off. A recorded graph is
replaced by its first operations. The refresh always runs, since a replay waits for its entry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from graphkit.audit.audit_log import NotChecked
from graphkit.graphs import RecordedGraph, Stage
from graphkit.graphs.cuda_graph import CudaGraph
from graphkit.graphs.driver import checked, runtime
from graphkit.graphs.recorded_graph import RecordedOp, replay_context
from graphkit.records import Node

SWITCHABLE = ("kernel", "memcpy", "memset")
"""Kinds of nodes that the driver can leave out of a replay."""
_WITHOUT_EFFECT = ("empty", "event record", "event wait")
Nodes = Sequence[Node]
ReplayGraph = Callable[[Any], object]
"""Replays a graph."""


@contextmanager
def switches(
    graph: Any, nodes: Nodes, wait: Callable[[], object]
) -> Iterator[NodeSwitches | FirstOps]:
    """Yield the switches of a graph, and switch all nodes on afterwards.

    Raises:
        NotChecked: A node cannot be switched off.
    """
    graphs = getattr(graph, "graphs", (graph,))
    if isinstance(graphs[0], RecordedGraph):
        yield FirstOps(graph, nodes)
        return
    switched = NodeSwitches(graph, nodes, wait)
    try:
        yield switched
    finally:
        switched.keep_first(len(nodes))


class NodeSwitches:
    """Switches the nodes of an executable CUDA graph off and on."""

    def __init__(self, graph: Any, nodes: Nodes, wait: Callable[[], object] = lambda: None) -> None:
        for node in nodes:
            if node.kind not in (*SWITCHABLE, *_WITHOUT_EFFECT):
                raise NotChecked(f"node {node.index}, a {node.kind}, cannot be switched off")
        bindings = runtime()
        assert bindings is not None, "an inspected graph has bindings"
        self._graph, self._wait, self._bindings = graph, wait, bindings
        graphs: Sequence[CudaGraph] = getattr(graph, "graphs", (graph,))
        handles = [handle for part in graphs for handle in self._handles(part)]
        self._nodes = list(zip(nodes, handles, strict=True))
        self._refresh = _refresh(nodes)

    def replay_first(self, count: int, replay: ReplayGraph) -> None:
        """Replay the refresh and the first ``count`` nodes, and wait for their end."""
        self.keep_only({*range(count), *self._refresh})
        replay(self._graph)
        # A graph whose last nodes are off lets the stream go on before its last node that is on has
        # ended (driver 580, seen on a busy device).
        self._wait()

    def keep_first(self, count: int) -> None:
        """Switch off all nodes except the first ``count``."""
        self.keep_only(range(count))

    def keep_only(self, indices: Container[int]) -> None:
        """Switch off all nodes except those of the indices."""
        for node, (executable, handle) in self._nodes:
            if node.kind in SWITCHABLE:
                is_on = int(node.index in indices)
                checked(self._bindings.cudaGraphNodeSetEnabled(executable, handle, is_on))

    def _handles(self, graph: CudaGraph) -> list[tuple[Any, Any]]:
        """Return the executable graph and the template's node, for each node."""
        bindings = self._bindings
        executable = bindings.cudaGraphExec_t(graph.graph.raw_cuda_graph_exec())
        template = bindings.cudaGraph_t(graph.graph.raw_cuda_graph())
        count = int(checked(bindings.cudaGraphGetNodes(template))[-1])
        handles = checked(bindings.cudaGraphGetNodes(template, count))[0][:count]
        return [(executable, handle) for handle in handles]


class FirstOps:
    """Operations of recorded graphs, replayed like a graph.

    Args:
        graph: A ``RecordedGraph``, or a sequence of them.
        nodes: Its nodes; without them all operations are replayed.
        after: Called after each operation.

    Attributes:
        output: Output of the whole graph.
    """

    def __init__(
        self,
        graph: Any,
        nodes: Nodes = (),
        after: Callable[[RecordedOp], object] = lambda _op: None,
    ) -> None:
        graphs: Sequence[RecordedGraph] = getattr(graph, "graphs", (graph,))
        self._ops = [op for part in graphs for op in part.ops]
        self.output, self._refresh = graph.output, _refresh(nodes)
        self._kept, self._after = self._ops, after

    def replay_first(self, count: int, replay: ReplayGraph) -> None:
        """Replay the refresh and the first ``count`` operations."""
        kept = {*range(count), *self._refresh}
        self._kept = [op for index, op in enumerate(self._ops) if index in kept]
        replay(self)

    def replay(self) -> None:
        """Run the kept operations; see ``RecordedGraph.replay``."""
        with replay_context():
            for op in self._kept:
                op.run()
                self._after(op)


def _refresh(nodes: Nodes) -> set[int]:
    return {node.index for node in nodes if node.module == Stage.REFRESH}


def first_node_after(
    graph: Any,
    nodes: Nodes,
    wait: Callable[[], object],
    look: Callable[[Callable[[ReplayGraph], object]], object],
) -> Node | None:
    """Return the first node after which something differs, by bisection over the nodes of a graph.

    ``look`` gets a function that replays the first nodes by the function that it gets, and returns
    what to compare with the result for no node at all.

    Raises:
        NotChecked: A node cannot be switched off.
    """
    with switches(graph, nodes, wait) as switched:
        start = look(partial(switched.replay_first, 0))
        index = bisected(
            lambda count: look(partial(switched.replay_first, count)) != start, len(nodes)
        )
    return None if index is None else nodes[index]


def bisected(differ: Callable[[int], bool], count: int) -> int | None:
    """Return the index of a step after which results differ, and before which they are equal.

    Args:
        differ: Returns whether results differ after the first so many steps; after 0 they do not.
        count: Number of steps. The result is ``None`` if nothing differs after all of them.
    """
    return bisect_left(range(1, count), True, key=differ) if differ(count) else None
