"""The operations of the recorder as nodes, told in the same words as a CUDA graph's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, repeat
from typing import Any

import torch

from graphkit.errors import InspectError
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.recorder import RecordedGraph, RecordedOp
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors
from graphkit.graphs.walk.timing import Span
from graphkit.records import Argument, Edge, Node

_MOST_SHOWN = 60
_REPLAYS = 3


class RecorderWalk:
    """Graphs of the recorder; see ``CudaWalk`` for its likeness on CUDA.

    Args:
        parts: Graphs that one replay runs one after the other.
        places: What made each operation.
        names: What arguments point to.

    Attributes:
        nodes, edges, memory: As in a ``GraphRecord``, without times.
        device: Where the graphs run.

    Raises:
        InspectError: A graph was closed.
    """

    backend, device, memory = "recorder", torch.device("cpu"), None

    def __init__(
        self, parts: Sequence[RecordedGraph], places: Sequence[NodeOrigin], names: NamedTensors
    ) -> None:
        if any(len(part.ops) != part.num_nodes for part in parts):
            raise InspectError(
                "cannot look into a graph that was closed. Look into it before close()."
            )
        self._parts = parts
        ops = tuple(op for part in parts for op in part.ops)
        self.nodes = list(nodes_of(ops, places, names))
        self.edges = tuple(edges_of(ops))

    def launches(self, replay: Callable[[], object]) -> Sequence[Sequence[Span]]:
        """How long each operation took, in a few replays."""
        try:
            return [self._launch(replay) for _ in range(_REPLAYS)]
        finally:
            for part in self._parts:
                part.timestamps = None

    def _launch(self, replay: Callable[[], object]) -> list[Span]:
        for part in self._parts:
            part.timestamps = []
        replay()
        times = [both for part in self._parts for both in pairwise(part.timestamps or [])]
        both = zip(self.nodes, times, strict=False)
        return [Span(node.name, (), begin, end - begin) for node, (begin, end) in both]


def nodes_of(
    ops: Sequence[RecordedOp], places: Sequence[NodeOrigin], names: NamedTensors
) -> Iterator[Node]:
    """Operations as nodes; arguments are named by the schema, what an operation makes by ``->``.

    A tensor that nobody named is called by the operation that made its storage, such as ``%14``.
    """
    made: dict[str, torch.Tensor] = {}
    for index, op in enumerate(ops):
        made |= {f"%{index}" + (f".{i}" if i else ""): t for i, t in enumerate(op.results)}
    # What nobody named and no operation made came from outside: a constant.
    memory = MemoryMap({**names, "pool": made}, ask=lambda _address: "external")
    placed = chain(places, repeat(NodeOrigin()))
    for index, (op, place) in enumerate(zip(ops, placed, strict=False)):
        yield Node(
            index=index,
            kind="op",
            name=op.op.name(),
            short_name=op.op.overloadpacket.__name__,
            op=op.op.name(),
            arguments=tuple(_arguments(op, memory)),
            module=place.module,
            source=place.source,
            scope=place.scope,
        )


def edges_of(ops: tuple[RecordedOp, ...]) -> Iterator[Edge]:
    """From the operation that wrote a storage last to each that uses it."""
    wrote: dict[int, int] = {}
    for index, op in enumerate(ops):
        given = list(_given(op))
        used = [_storage(t) for _, value, _ in given for t in tensors_in(value)]
        for source in dict.fromkeys(wrote[s] for s in used if s in wrote):
            yield Edge(source=source, target=index)
        changed = [t for _, value, is_written in given if is_written for t in tensors_in(value)]
        for tensor in (*changed, *op.results):
            wrote[_storage(tensor)] = index


def _given(op: RecordedOp) -> Iterator[tuple[str, Any, bool]]:
    """Each argument's name and value, and whether the operation writes into it."""
    declared = {argument.name: argument for argument in op.op._schema.arguments}
    for name, value in (*zip(declared, op.args, strict=False), *op.kwargs.items()):
        alias = declared[name].alias_info
        yield name, value, alias is not None and alias.is_write


def _arguments(op: RecordedOp, memory: MemoryMap) -> Iterator[Argument]:
    for name, value, _ in _given(op):
        yield _argument(name, value, memory)
    for index, result in enumerate(op.results):
        yield _argument(f"-> {index}", result, memory)


def _argument(name: str, value: Any, memory: MemoryMap) -> Argument:
    tensors = list(tensors_in(value))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    pointers = tuple(filter(None, (memory.find(tensor.data_ptr()) for tensor in tensors)))
    if isinstance(value, torch.Tensor):
        lies = f" at {pointers[0].name}" if pointers else ""
        text, kind = f"{_shape(value)}{lies}", "tensor"
    elif tensors:
        text, kind = ", ".join(map(_shape, tensors)), "tensor"
    else:
        text, kind = _brief(value), "value"
    return Argument(name=name, size=size, kind=kind, text=text, pointers=pointers)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def repr_without_address(value: Any) -> str:
    """A value as Python shows it, but for its address, which is another one in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _brief(value: Any) -> str:
    text = repr_without_address(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an argument is, or that a list in it holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
