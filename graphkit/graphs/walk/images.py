"""A captured graph as something that two captures of it can be compared by.

Addresses in the graph's own pool become offsets, which are the same however often it is captured.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphkit.graphs.cuda import CudaGraph
from graphkit.graphs.driver import memory_kind
from graphkit.graphs.host_memory import OTHER_UNSET, HostMemory
from graphkit.graphs.recorder import RecordedGraph
from graphkit.graphs.walk.arguments import Parameter, is_plain, number
from graphkit.graphs.walk.driver_nodes import DriverNode, DriverWalk
from graphkit.graphs.walk.kernel_names import short
from graphkit.graphs.walk.memory_map import MemoryMap, Names
from graphkit.graphs.walk.recorded import nodes_of
from graphkit.records import Argument

_LOWEST = 1 << 16
"""No process has memory below."""


@dataclass(frozen=True, slots=True)
class ArgumentImage:
    """What a node was given, without what is different from capture to capture.

    Attributes:
        name: The parameter's name; empty for a compiled kernel's.
        data: Its bytes on CUDA, its text on the recorder.
        constants: On the recorder, address and digest of tensors in it that came from outside and
            that nobody declared. The same memory may hold something else at every replay; other
            memory is a constant that the capture made.
        alive: Those tensors, so that no later capture's stand where they stood.
    """

    name: str
    data: bytes | str
    constants: tuple[tuple[int, str], ...] = ()
    alive: tuple[torch.Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class NodeImage:
    """What a node does.

    Attributes:
        name: The kernel, or the operation.
        launch: How it is launched: what of it, and its value.
        arguments: What it is given.
    """

    name: str
    launch: tuple[tuple[str, str], ...]
    arguments: tuple[ArgumentImage, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two images of a graph differ.

    Attributes:
        node: Index of the node; that of the first that only one of them has.
        what: ``grid``, ``block``, ``kernel``, ``argument`` ...
        argument: Index of the argument; ``None`` if it is none.
        offset: Where in the argument, in bytes.
        before, after: The values, decoded.
    """

    node: int
    what: str
    before: str
    after: str
    argument: int | None = None
    offset: int | None = None


def image_of(graph: Any, names: Names) -> tuple[NodeImage, ...]:
    """The image of a runner's graph.

    Args:
        graph: A ``CudaGraph`` or ``RecordedGraph``, or a chain of them.
        names: As for ``inspect_graph``; the recorder's tensors are compared by name.
    """
    parts: Sequence[Any] = getattr(graph, "graphs", (graph,))
    if isinstance(parts[0], RecordedGraph):
        return tuple(_of_ops(parts, names))
    return tuple(node for part in parts for node in _of_template(part))


Unset = Mapping[tuple[int, int], frozenset[int]]
"""Bytes that mean nothing, by node and argument: torch leaves them as they were on the stack."""


def differing_bytes(*images: Sequence[NodeImage]) -> Unset:
    """The bytes in which images of equal captures differ."""
    found: dict[tuple[int, int], frozenset[int]] = {}
    first, *others = images
    for other in others:
        for key, before, after in _differing_arguments(first, other):
            found[key] = found.get(key, frozenset()) | _differing(before, after)
    return found


def filled_bytes(zeros: Sequence[NodeImage], other: Sequence[NodeImage]) -> Unset:
    """The bytes that hold what the stack was filled with.

    Args:
        zeros: The image of a capture that filled it with zeros.
        other: That of one that filled it with ``OTHER_UNSET``.
    """
    return {
        key: frozenset(i for i in _differing(before, after) if after[i] == OTHER_UNSET)
        for key, before, after in _differing_arguments(zeros, other)
    }


def _differing_arguments(
    one: Sequence[NodeImage], other: Sequence[NodeImage]
) -> Iterator[tuple[tuple[int, int], bytes, bytes]]:
    """Node and argument, and its bytes in both, of arguments that are bytes and differ."""
    for index, nodes in enumerate(zip(one, other, strict=False)):
        arguments = zip(nodes[0].arguments, nodes[1].arguments, strict=False)
        for place, (before, after) in enumerate(arguments):
            one_data, other_data = before.data, after.data
            if isinstance(one_data, str) or isinstance(other_data, str):
                continue
            if one_data != other_data:
                yield (index, place), one_data, other_data


def differences(
    before: Sequence[NodeImage], after: Sequence[NodeImage], unset: Unset
) -> Iterator[Difference]:
    """Where two images differ, in the order of their nodes.

    Args:
        before: The one image.
        after: The other.
        unset: Bytes to pass over.
    """
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one == other:
            continue
        if one.name != other.name or len(one.arguments) != len(other.arguments):
            yield Difference(index, "kernel", short(one.name), short(other.name))
            continue
        for (what, value), (_, now) in zip(one.launch, other.launch, strict=True):
            if value != now:
                yield Difference(index, what, value, now)
        for place, both in enumerate(zip(one.arguments, other.arguments, strict=True)):
            yield from _of_argument(index, place, *both, unset.get((index, place), frozenset()))
    if len(before) != len(after):
        first = min(len(before), len(after))
        yield Difference(first, "number of nodes", str(len(before)), str(len(after)))


def _of_argument(
    node: int, place: int, before: ArgumentImage, after: ArgumentImage, unset: frozenset[int]
) -> Iterator[Difference]:
    one, other = before.data, after.data
    if one == other:
        for (address, held), (now, holds) in zip(before.constants, after.constants, strict=False):
            if address != now and held != holds:
                yield Difference(node, "argument", f"constant {held}", f"constant {holds}", place)
        return
    if isinstance(one, str) or isinstance(other, str):
        yield Difference(node, "argument", str(one), str(other), place)
        return
    width = 8 if not unset and _is_one_number(one, other) else 4
    changed = _differing(one, other) - unset
    for at in sorted({byte // width * width for byte in changed}):
        values = number(one[at : at + width]), number(other[at : at + width])
        yield Difference(node, "argument", *values, place, at)


def _is_one_number(one: bytes, other: bytes) -> bool:
    """Whether bytes are eight that belong together, and not four beside four that nobody set."""
    both_halves = one[:4] != other[:4] and one[4:] != other[4:]
    return len(one) == 8 and (both_halves or (is_plain(one) and is_plain(other)))


def _differing(one: bytes, other: bytes) -> frozenset[int]:
    return frozenset(
        i for i, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]
    )


def _of_template(part: CudaGraph) -> Iterator[NodeImage]:
    memory = MemoryMap({}, torch.cuda.memory_snapshot(), part.graph.pool())
    host = HostMemory()
    for node in DriverWalk(part.graph.raw_cuda_graph()).nodes:
        arguments = [ArgumentImage(p.name, _settled(p, memory, host)) for p in node.parameters]
        yield NodeImage(node.name, _launch(node), tuple(arguments))


def _launch(node: DriverNode) -> tuple[tuple[str, str], ...]:
    unusual = ", ".join(f"{name} {value}" for name, value in node.attributes.items())
    return (
        ("grid", _extent(node.grid)),
        ("block", _extent(node.block)),
        ("cluster", _extent(node.cluster)),
        ("shared memory", str(node.shared_memory_bytes)),
        ("attributes", unusual),
    )


def _extent(extent: Sequence[int]) -> str:
    return "x".join(map(str, extent))


def _settled(parameter: Parameter, memory: MemoryMap, host: HostMemory) -> bytes:
    """The bytes with offsets for addresses in the graph's pool, and without the host's own.

    What the stack held may be an address that stands between two aligned ones.
    """
    data = bytearray(parameter.data or b"")
    for at, word in (*parameter.addresses(_LOWEST), *parameter.addresses(_LOWEST, shift=4)):
        offset = memory.pool_offset(word)
        if offset is not None:
            data[at : at + 8] = offset.to_bytes(8, "little")
        elif host.holds(word) and not memory_kind(word):
            data[at : at + 8] = bytes(8)
    return bytes(data)


def _of_ops(parts: Sequence[RecordedGraph], names: Names) -> Iterator[NodeImage]:
    ops = tuple(op for part in parts for op in part.ops)
    for op, node in zip(ops, nodes_of(ops, (), names), strict=True):
        given = {t.data_ptr(): t for t in (*op.args, *op.kwargs.values()) if _is_tensor(t)}
        arguments = tuple(_given(each, given) for each in node.arguments)
        yield NodeImage(node.name, (), arguments)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _given(argument: Argument, given: Mapping[int, torch.Tensor]) -> ArgumentImage:
    outside = [each.address for each in argument.pointers if each.memory == "external"]
    alive = tuple(given[address] for address in outside if address in given)
    constants = tuple((tensor.data_ptr(), _digest(tensor)) for tensor in alive)
    return ArgumentImage(argument.name, argument.text, constants, alive)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"#{zlib.crc32(values.numpy().tobytes()):08x}"
