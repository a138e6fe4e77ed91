"""The first node with other results in a second graph of the same step.

Recorded graphs are replayed operation by operation, and the results compared. Of CUDA graphs only
memory can be read: the first nodes of both run, the later ones, which may reuse memory, are off,
and the pools that they leave are compared. Bisection finds the node in log2(nodes) steps.

Matrix products that add in changing order, with atomics, leave different bits each time. A
difference beyond rounding shows that a node computes something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from graphkit.audit.audit_log import NotChecked
from graphkit.audit.bits import checksum
from graphkit.audit.node_switches import FirstOps, Nodes, ReplayGraph, bisected, switches
from graphkit.graphs.operations import arguments_written
from graphkit.graphs.pool_memory import UNINITIALISED, device_bytes, memory_segments
from graphkit.graphs.recorded_graph import RecordedOp
from graphkit.records import Argument

Segment = tuple[int, int]
"""Address and size of a memory segment, in bytes."""
_BLOCK_BYTES = 512
"""torch's allocator gives every tensor a multiple of this."""
_SMALLEST = 1e-30
"""Integers and flags, read as float32, are smaller; they must be equal."""
_ROUNDINGS = {4: 64, 2: 4}
"""Rounding errors of a sum of products by item size. In two bytes only the result is rounded."""


def first_result_difference(graph: Any, new: Any, replay: ReplayGraph) -> int | None:
    """Return the index of the first operation whose results differ between two graphs.

    Ignores results that differ between two replays of the first graph, too: the refresh counts
    replays, and some memory is not initialised.

    Args:
        graph: A ``RecordedGraph``, or a sequence of them.
        new: Another one, of the same operations.
        replay: Replays a graph, each time from the same state.
    """
    results: list[list[list[int]]] = []

    def note(op: RecordedOp) -> None:
        results[-1].append([checksum(tensor) for tensor in written_tensors(op)])

    for captured in (graph, graph, new):
        results.append([])
        replay(FirstOps(captured, after=note))
    differ = (one == again != other for one, again, other in zip(*results, strict=False))
    return next((index for index, differs in enumerate(differ) if differs), None)


def written_tensors(op: RecordedOp) -> Iterator[torch.Tensor]:
    """Yield the results of an operation and the arguments that it writes."""
    if op.op.overloadpacket not in UNINITIALISED:
        yield from op.results
    yield from arguments_written(op.op, op.args, op.kwargs)


def first_memory_difference(
    graphs: tuple[Any, Any],
    nodes: tuple[Nodes, Nodes],
    replay: ReplayGraph,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> int | None:
    """Return the index of the first node after which two graphs of equal nodes leave other memory.

    Needs as much device memory again as the pool of the first graph, and restores that pool.

    Args:
        graphs: ``CudaGraph``, or sequences of them.
        nodes: Nodes of each; those of the second graph with their origins.
        replay: Replays a graph, each time from the same state.
        device: Device of the graphs.
        dtype: The model's dtype, to ignore differences within rounding.

    Raises:
        NotChecked: The nodes differ, a node cannot be switched off, or the pools are laid out
            differently.
    """
    if [node.name for node in nodes[0]] != [node.name for node in nodes[1]]:
        raise NotChecked("the two captures have different nodes")
    pools, wait = _Pools(*nodes, device), partial(torch.cuda.synchronize, device)
    with pools.preserved(), ExitStack() as stack:
        switched = [
            stack.enter_context(switches(graph, nodes[1], wait))  # the nodes that have modules
            for graph in graphs
        ]

        def differ(count: int) -> bool:
            pools.clear()
            for switch in switched:
                switch.replay_first(count, replay)
            return pools.differ(dtype)

        return bisected(differ, len(nodes[1]))


class _Pools:
    """Memory of two graphs, in pairs of segments.

    Two segments form a pair if the same argument of the same node points into them.
    """

    def __init__(self, before: Nodes, after: Nodes, device: torch.device) -> None:
        segments = [
            (int(segment["address"]), int(segment["total_size"]))
            for segment in memory_segments()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        ]
        pairs: dict[Segment, Segment] = {}
        for addresses in _pool_addresses(before, after):
            one, other = (_find_segment(address, segments) for address in addresses)
            is_aligned = addresses[0] - one[0] == addresses[1] - other[0]
            if not is_aligned or pairs.setdefault(one, other) != other:
                raise NotChecked("the memory of the two captures is laid out differently")
        if not pairs:
            raise NotChecked("no argument points to the graph's own memory")
        self._device = device
        self._pairs = [
            (device_bytes(*one, device), device_bytes(*two, device)) for one, two in pairs.items()
        ]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the memory of the first graph afterwards: it holds outputs."""
        saved = [one.clone() for one, _ in self._pairs]
        try:
            yield
        finally:
            for (one, _), bytes_ in zip(self._pairs, saved, strict=True):
                one.copy_(bytes_)
            torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Fill the memory of both graphs with zeros."""
        for memory in (memory for pair in self._pairs for memory in pair):
            memory.zero_()

    def differ(self, dtype: torch.dtype | None) -> bool:
        """Return whether common bytes differ; with a dtype, beyond rounding."""
        pairs = [(one[: len(two)], two[: len(one)]) for one, two in self._pairs]
        if dtype is not None:
            return any(is_beyond_rounding(*pair, dtype) for pair in pairs)
        return not all(torch.equal(*pair) for pair in pairs)


def _pool_addresses(before: Nodes, after: Nodes) -> Iterator[tuple[int, int]]:
    """Yield pairs of addresses in the graphs' memory that the same argument of a node holds."""
    for one, other in zip(before, after, strict=True):
        for arguments in zip(one.arguments, other.arguments, strict=True):
            pair = [_pool_address(argument) for argument in arguments]
            if pair[0] and pair[1]:
                yield pair[0], pair[1]


def _pool_address(argument: Argument) -> int:
    """Return the address of a plain pointer into the graph's pool, else 0."""
    pointer = argument.pointers[0] if argument.kind == "pointer" else None
    return pointer.address if pointer is not None and pointer.memory == "pool" else 0


def _find_segment(address: int, segments: Sequence[Segment]) -> Segment:
    around = (segment for segment in segments if segment[0] <= address < segment[0] + segment[1])
    segment = next(around, None)
    if segment is None:
        raise NotChecked("the allocator does not know the graph's memory")
    return segment


def is_beyond_rounding(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether any number differs by more than sums in a different order do.

    The dtype of memory in a pool is unknown. So a word of four bytes is close if its numbers are,
    read in the model's dtype, relative to the largest number of the block. With bfloat16 it may
    also be read as float32. ``one`` and ``two`` are bytes of whole blocks of the allocator.
    """
    close = (one == two).view(-1, 4).all(1)
    allowed = _ROUNDINGS[dtype.itemsize] * torch.finfo(dtype).eps
    for kind in {dtype, torch.float32 if dtype == torch.bfloat16 else dtype}:
        close |= _close_words(one, two, kind, allowed)
    return not bool(close.all())


def _close_words(
    one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype, allowed: float
) -> torch.Tensor:
    """Return for each word of four bytes whether all its numbers are close, bool [words]."""
    numbers = _BLOCK_BYTES // dtype.itemsize
    a, b = (memory.view(dtype).float().view(-1, numbers) for memory in (one, two))
    largest = torch.where(a.isfinite(), a.abs(), 0.0).amax(1, keepdim=True)
    close = ((a - b).abs() <= allowed * largest) & (largest > _SMALLEST)
    return close.view(-1, 4 // dtype.itemsize).all(1)
