"""Replaying the first nodes of two CUDA graphs alone, to find the one from which on memory differs.

The nodes of an executable graph can be switched off: kernels, copies and fills can. So the first
of them run, and what they left in the graph's pool is compared with what those of the other graph
left in its own. By halves that takes log2(nodes) steps. Later nodes, which may use the same memory
again, are off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graphkit.audit.rerun import Rerun
from graphkit.audit.shadow.rounding import is_beyond_rounding
from graphkit.graphs import Stage
from graphkit.graphs.cuda import CudaGraph
from graphkit.graphs.driver import checked, runtime
from graphkit.records import Argument, Node

_SWITCHABLE = ("kernel", "memcpy", "memset")
_IDLE = ("empty", "event record", "event wait")
Nodes = Sequence[Node]
Run = tuple[int, int]
"""Where a segment of memory begins, and its bytes."""


class Incomparable(Exception):  # noqa: N818 - becomes a finding's words
    """Two graphs cannot be compared this way; says why."""


def first_other_memory(
    graphs: tuple[Any, Any],
    nodes: tuple[Nodes, Nodes],
    rerun: Rerun,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> int | None:
    """Index of the first node from which on two graphs of the same nodes leave other memory.

    Needs as much device memory again as the pool of the first, which is as before afterwards.

    Args:
        graphs: ``CudaGraph``, or chains of them.
        nodes: Those of each; of the second one with what made them.
        rerun: Replays a graph from the same moment.
        device: Where they live.
        dtype: The model's, if only what is further apart than rounding counts.

    Raises:
        Incomparable: They are not of the same nodes, one cannot be switched off, or the pools are
            not laid out alike.
    """
    if [node.name for node in nodes[0]] != [node.name for node in nodes[1]]:
        raise Incomparable("the two captures are not of the same nodes")
    always = {node.index for node in nodes[1] if node.module == Stage.REFRESH}
    pools = _Pools(*nodes, device)
    with pools.kept(), ExitStack() as stack:
        switches = [
            stack.enter_context(_switches(*each)) for each in zip(graphs, nodes, strict=True)
        ]

        def differ(count: int) -> bool:
            pools.clear()
            for graph, switch in zip(graphs, switches, strict=True):
                switch.leave(count, always)
                rerun(graph)
                # Where its last nodes are off, a graph lets what follows in the stream begin before
                # its last node that is on has ended (driver 580, seen on a busy device).
                torch.cuda.synchronize(device)
            return pools.differ(dtype)

        return bisected(differ, len(nodes[1]))


def bisected(differ: Callable[[int], bool], count: int) -> int | None:
    """Index of a step after which things differ, and before which they do not.

    Args:
        differ: Whether they differ after the first so many steps; after none they do not.
        count: How many steps there are; ``None`` comes back if nothing differs after all of them.
    """
    alike, different = 0, count
    if not differ(different):
        return None
    while different - alike > 1:
        middle = (alike + different) // 2
        alike, different = (alike, middle) if differ(middle) else (middle, different)
    return alike


class _Switches:
    """The nodes of an executable graph, to be switched off and on."""

    def __init__(self, graph: Any, nodes: Nodes) -> None:
        for node in nodes:
            if node.kind not in (*_SWITCHABLE, *_IDLE):
                raise Incomparable(f"node {node.index}, a {node.kind}, cannot be switched off")
        self._bindings = runtime()
        parts: Sequence[CudaGraph] = getattr(graph, "graphs", (graph,))
        handles = [each for part in parts for each in self._handles(part)]
        self._nodes = list(zip(nodes, handles, strict=True))

    def leave(self, count: int, always: Collection[int] = ()) -> None:
        """Switch all nodes off but the first ``count``, and those that must always run."""
        assert self._bindings is not None, "a graph that was walked has bindings"
        for node, (executable, handle) in self._nodes:
            if node.kind in _SWITCHABLE:
                is_on = node.index < count or node.index in always
                checked(self._bindings.cudaGraphNodeSetEnabled(executable, handle, int(is_on)))

    def _handles(self, part: CudaGraph) -> list[tuple[Any, Any]]:
        """The executable graph and the template's node, of each node."""
        bindings = self._bindings
        assert bindings is not None, "a graph that was walked has bindings"
        executable = bindings.cudaGraphExec_t(part.graph.raw_cuda_graph_exec())
        template = bindings.cudaGraph_t(part.graph.raw_cuda_graph())
        count = int(checked(bindings.cudaGraphGetNodes(template))[-1])
        handles = checked(bindings.cudaGraphGetNodes(template, count))[0][:count]
        return [(executable, handle) for handle in handles]


@contextmanager
def _switches(graph: Any, nodes: Nodes) -> Iterator[_Switches]:
    """A graph's switches, which are all on afterwards."""
    switches = _Switches(graph, nodes)
    try:
        yield switches
    finally:
        switches.leave(len(nodes))


class _Pools:
    """The memory of two graphs, segment by segment.

    Segments belong together if the same argument of the same node leads into them.
    """

    def __init__(self, before: Nodes, after: Nodes, device: torch.device) -> None:
        segments = [
            (int(each["address"]), int(each["total_size"]))
            for each in torch.cuda.memory_snapshot()
            if tuple(each["segment_pool_id"]) != (0, 0)
        ]
        pairs: dict[Run, Run] = {}
        for addresses in _into_pools(before, after):
            one, other = (_around(address, segments) for address in addresses)
            is_alike = addresses[0] - one[0] == addresses[1] - other[0]
            if not is_alike or pairs.setdefault(one, other) != other:
                raise Incomparable("the memory of the two captures is laid out otherwise")
        if not pairs:
            raise Incomparable("no node is given memory of the graph's own")
        self._device = device
        self._pairs = [(_bytes(*one, device), _bytes(*two, device)) for one, two in pairs.items()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the first graph's memory back afterwards: outputs live there."""
        saved = [one.clone() for one, _ in self._pairs]
        try:
            yield
        finally:
            for (one, _), bytes_ in zip(self._pairs, saved, strict=True):
                one.copy_(bytes_)
            torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Fill both with zeros."""
        for each in (each for pair in self._pairs for each in pair):
            each.zero_()

    def differ(self, dtype: torch.dtype | None) -> bool:
        """Whether they hold something else, as far as both go; with a dtype, beyond rounding."""
        pairs = [(one[: len(two)], two[: len(one)]) for one, two in self._pairs]
        if dtype is not None:
            return any(is_beyond_rounding(*pair, dtype) for pair in pairs)
        return not all(torch.equal(*pair) for pair in pairs)


def _into_pools(before: Nodes, after: Nodes) -> Iterator[tuple[int, int]]:
    """Addresses of the graphs' own memory that the same argument of the same node holds."""
    for one, other in zip(before, after, strict=True):
        for arguments in zip(one.arguments, other.arguments, strict=True):
            found = [_own_address(argument) for argument in arguments]
            if found[0] and found[1]:
                yield found[0], found[1]


def _own_address(argument: Argument) -> int:
    """Of a plain pointer into the graph's pool; else 0."""
    pointer = argument.pointers[0] if argument.kind == "pointer" else None
    return pointer.address if pointer is not None and pointer.memory == "pool" else 0


def _around(address: int, segments: Sequence[Run]) -> Run:
    found = (run for run in segments if run[0] <= address < run[0] + run[1])
    segment = next(found, None)
    if segment is None:
        raise Incomparable("the allocator does not know the graph's memory")
    return segment


class _Memory:
    """Device memory for ``torch.as_tensor``, by CUDA's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, size), device=device)
