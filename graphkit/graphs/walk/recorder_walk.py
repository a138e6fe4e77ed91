"""Nodes, edges and times of a recorded graph."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat
from statistics import median
from typing import Any

import torch

from graphkit.errors import InspectError
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.operations import distinct_bytes, schema, storage_id, tensors_in
from graphkit.graphs.recorded_graph import RecordedGraph, RecordedOp
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.timing import Span
from graphkit.records import Argument, Edge, Node, Pointer, tensor_text

_LONGEST_TEXT = 60
"""Letters of an argument's value, which is one column of a page."""
_TIMED_REPLAYS = 3
"""Timed replays of a recorded graph, each of which takes much longer than a CUDA graph's."""


class RecorderWalk:
    """Reads a recorded graph; the counterpart of ``CudaWalk``.

    Attributes:
        nodes, edges, memory: As in a ``GraphRecord``, without times; there is no memory.
        device: The graph's device.

    Raises:
        InspectError: The graph was closed.
    """

    backend, device, memory = "recorder", torch.device("cpu"), None

    def __init__(
        self, graph: RecordedGraph, origins: Sequence[NodeOrigin], names: NamedTensors
    ) -> None:
        if len(graph.ops) != graph.num_nodes:
            raise InspectError("cannot inspect a closed graph. Inspect it before close().")
        self._graph = graph
        self.nodes = list(recorded_nodes(graph.ops, origins, names))
        self.edges = tuple(recorded_edges(graph.ops))

    def launches(self, replay: Callable[[], object]) -> Sequence[Sequence[Span]]:
        """Replay a few times, and return the time span of each operation per replay."""
        try:
            return [self._launch(replay) for _ in range(_TIMED_REPLAYS)]
        finally:
            self._graph.timestamps = None

    def unprofiled_us(self, replay: Callable[[], object]) -> float:
        """Return the median time of a replay without time stamps per operation, in us."""
        times = []
        for _ in range(_TIMED_REPLAYS):
            began = time.perf_counter()
            replay()
            times.append((time.perf_counter() - began) * 1e6)
        return median(times)

    def _launch(self, replay: Callable[[], object]) -> list[Span]:
        times: list[int] = []
        self._graph.timestamps = times
        replay()
        pairs = zip(self.nodes, pairwise(times), strict=False)
        return [Span(node.name, (), begin, end - begin) for node, (begin, end) in pairs]


def recorded_nodes(
    ops: Sequence[RecordedOp], origins: Sequence[NodeOrigin], names: NamedTensors
) -> Iterator[Node]:
    """Yield operations as nodes.

    Arguments have the names of the operation's schema, results are called ``-> 0``, ``-> 1``. A
    tensor without a name is called by the operation that allocated it, such as ``%14``.
    """
    results: dict[str, torch.Tensor] = {}
    for index, op in enumerate(ops):
        results |= {f"%{index}" + (f".{i}" if i else ""): t for i, t in enumerate(op.results)}
    # A tensor without a name that no operation allocated is a constant from outside.
    memory = MemoryMap({**names, "pool": results}, query_kind=lambda _address: "external")
    known = chain(origins, repeat(NodeOrigin()))
    for index, (op, origin) in enumerate(zip(ops, known, strict=False)):
        yield Node(
            index=index,
            kind="op",
            name=op.op.name(),
            short_name=op.op.overloadpacket.__name__,
            op=op.op.name(),
            arguments=tuple(_arguments(op, memory)),
            module=origin.module,
            source=origin.source,
            scope=origin.scope,
        )


def recorded_edges(ops: tuple[RecordedOp, ...]) -> Iterator[Edge]:
    """Yield an edge from the last operation that wrote a storage to each one that uses it."""
    writers: dict[int, int] = {}
    for index, op in enumerate(ops):
        arguments = list(_schema_arguments(op))
        used = [storage_id(t) for _, value, _ in arguments for t in tensors_in(value)]
        for source in dict.fromkeys(writers[s] for s in used if s in writers):
            yield Edge(source=source, target=index)
        written = [t for _, value, is_written in arguments if is_written for t in tensors_in(value)]
        for tensor in (*written, *op.results):
            writers[storage_id(tensor)] = index


def _schema_arguments(op: RecordedOp) -> Iterator[tuple[str, Any, bool]]:
    """Yield each argument's name and value, and whether the operation writes it."""
    declared = {argument.name: argument for argument in schema(op.op).arguments}
    for name, value in (*zip(declared, op.args, strict=False), *op.kwargs.items()):
        alias = declared[name].alias_info
        yield name, value, alias is not None and alias.is_write


def _arguments(op: RecordedOp, memory: MemoryMap) -> Iterator[Argument]:
    for name, value, _ in _schema_arguments(op):
        yield _argument(name, value, memory)
    for index, result in enumerate(op.results):
        yield _argument(f"-> {index}", result, memory)


def _argument(name: str, value: Any, memory: MemoryMap) -> Argument:
    tensors = tensors_in(value)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    pointers = tuple(filter(None, (_pointer(tensor, memory) for tensor in tensors)))
    if isinstance(value, torch.Tensor):
        location = f" at {pointers[0].name}" if pointers else ""
        text, kind = f"{tensor_text(value.dtype, value.shape)}{location}", "tensor"
    elif tensors:
        text, kind = ", ".join(tensor_text(t.dtype, t.shape) for t in tensors), "tensor"
    else:
        text, kind = _short_repr(value), "value"
    return Argument(name=name, size=size, kind=kind, text=text, pointers=pointers)


def _pointer(tensor: torch.Tensor, memory: MemoryMap) -> Pointer | None:
    pointer = memory.find(tensor.data_ptr())
    return pointer and replace(pointer, size=distinct_bytes(tensor))


def repr_without_address(value: Any) -> str:
    """Return a value's repr without its address, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _short_repr(value: Any) -> str:
    text = repr_without_address(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
