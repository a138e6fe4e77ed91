"""Replay of the first nodes of a graph, and bisection over their number.

Kernels, copies and fills of an executable CUDA graph can be switched off. A recorded graph is
replaced by its first operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphkit.graphs import RecordedGraph
from graphkit.graphs.cuda_graph import CudaGraph
from graphkit.graphs.driver import checked, runtime
from graphkit.graphs.recorded_op import RecordedOp, replay_context
from graphkit.records import Node

SWITCHABLE = ("kernel", "memcpy", "memset")
"""Kinds of nodes that the driver can leave out of a replay."""
_WITHOUT_EFFECT = ("empty", "event record", "event wait")
Nodes = Sequence[Node]


class Incomparable(Exception):  # noqa: N818 - its text becomes part of a finding
    """Two replays cannot be compared node by node. The text says why."""


@contextmanager
def switches(graph: Any, nodes: Nodes) -> Iterator[NodeSwitches | FirstOps]:
    """Yield the switches of a graph, and switch all nodes on afterwards.

    Args:
        graph: A ``CudaGraph`` or a ``RecordedGraph``, or a sequence of them.
        nodes: Its nodes.

    Raises:
        Incomparable: A node cannot be switched off.
    """
    graphs = getattr(graph, "graphs", (graph,))
    if isinstance(graphs[0], RecordedGraph):
        yield FirstOps(graph, [op for part in graphs for op in part.ops])
        return
    switched = NodeSwitches(graph, nodes)
    try:
        yield switched
    finally:
        switched.keep_first(len(nodes))


class NodeSwitches:
    """Switches the nodes of an executable CUDA graph off and on.

    Attributes:
        graph: The graph to replay.
    """

    def __init__(self, graph: Any, nodes: Nodes) -> None:
        for node in nodes:
            if node.kind not in (*SWITCHABLE, *_WITHOUT_EFFECT):
                raise Incomparable(f"node {node.index}, a {node.kind}, cannot be switched off")
        self.graph, self._bindings = graph, runtime()
        graphs: Sequence[CudaGraph] = getattr(graph, "graphs", (graph,))
        handles = [handle for part in graphs for handle in self._handles(part)]
        self._nodes = list(zip(nodes, handles, strict=True))

    def keep_first(self, count: int, always_on: Collection[int] = ()) -> None:
        """Switch off all nodes except the first ``count`` and those that must always run."""
        assert self._bindings is not None, "an inspected graph has bindings"
        for node, (executable, handle) in self._nodes:
            if node.kind in SWITCHABLE:
                is_on = node.index < count or node.index in always_on
                checked(self._bindings.cudaGraphNodeSetEnabled(executable, handle, int(is_on)))

    def keep_only(self, indices: Collection[int]) -> None:
        """Switch off all nodes except those of the indices."""
        self.keep_first(0, always_on=indices)

    def _handles(self, graph: CudaGraph) -> list[tuple[Any, Any]]:
        """Return the executable graph and the template's node, for each node."""
        bindings = self._bindings
        assert bindings is not None, "an inspected graph has bindings"
        executable = bindings.cudaGraphExec_t(graph.graph.raw_cuda_graph_exec())
        template = bindings.cudaGraph_t(graph.graph.raw_cuda_graph())
        count = int(checked(bindings.cudaGraphGetNodes(template))[-1])
        handles = checked(bindings.cudaGraphGetNodes(template, count))[0][:count]
        return [(executable, handle) for handle in handles]


class FirstOps:
    """The first operations of recorded graphs, replayed like a graph.

    Attributes:
        graph: The graph to replay, which is this object.
        output: Output of the whole graph.
    """

    def __init__(self, graph: Any, ops: Sequence[RecordedOp]) -> None:
        self.graph, self.output, self._ops = self, graph.output, ops
        self._kept = list(ops)

    def keep_first(self, count: int, always_on: Collection[int] = ()) -> None:
        """Leave out all operations except the first ``count`` and those that must always run."""
        self._kept = [op for i, op in enumerate(self._ops) if i < count or i in always_on]

    def replay(self) -> None:
        """Run the kept operations; see ``RecordedGraph.replay``."""
        with replay_context():
            for op in self._kept:
                op.run()


def bisected(differ: Callable[[int], bool], count: int) -> int | None:
    """Return the index of a step after which results differ, and before which they are equal.

    Args:
        differ: Returns whether results differ after the first so many steps; after 0 they do not.
        count: Number of steps. The result is ``None`` if nothing differs after all of them.
    """
    equal, different = 0, count
    if not differ(different):
        return None
    while different - equal > 1:
        middle = (equal + different) // 2
        equal, different = (equal, middle) if differ(middle) else (middle, different)
    return equal
