"""Which nodes of two graphs belong together, and what about them changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from graphkit.records.diff.alignment import align
from graphkit.records.graph import Argument, Node, Pointer

Pair = tuple[Node, Node]
NAMES = ("kernel", "name")
"""The fields that say that another kernel, or something else that has a name, does it now."""
_Key = Callable[[Node], Hashable]
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}")
"""Not an offset in something that has a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One fact that is not what it was.

    Attributes:
        field: Which, such as ``grid``.
        before, after: Its values for people; empty where there was none.
    """

    SPARSE: ClassVar[bool] = True
    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A node that is in both graphs but not the same.

    Attributes:
        before, after: Its index in either graph.
        name: Its short name, as of after.
        module: Its module, as of after.
        changes: At least one.
    """

    SPARSE: ClassVar[bool] = True
    before: int
    after: int
    name: str
    module: str
    changes: tuple[Change, ...]


def pair_nodes(before: Sequence[Node], after: Sequence[Node]) -> list[Pair]:
    """The nodes that are in both, in order.

    The same kernel of the same operation first; between two of those, the same operation by
    whatever kernel; and between two of those the same kernel wherever it moved.
    """
    return list(_paired(before, after, (_same_kernel, _same_operation, _same_name)))


def _paired(before: Sequence[Node], after: Sequence[Node], keys: Sequence[_Key]) -> Iterator[Pair]:
    if not keys or not before or not after:
        return
    pairs = align(*([keys[0](node) for node in nodes] for nodes in (before, after)))
    for (i, j), (i_next, j_next) in pairwise([(-1, -1), *pairs, (len(before), len(after))]):
        yield from _paired(before[i + 1 : i_next], after[j + 1 : j_next], keys[1:])
        if i_next < len(before):
            yield before[i_next], after[j_next]


def _same_kernel(node: Node) -> Hashable:
    return node.module, node.op, node.kind, node.short_name


def _same_operation(node: Node) -> Hashable:
    return node.module, node.op, node.kind


def _same_name(node: Node) -> Hashable:
    return node.kind, node.short_name


def changes_of(before: Node, after: Node) -> Iterator[Change]:
    """What a node does otherwise than it did. Where a line stands and what it costs is left out."""
    is_same_kernel = before.short_name == after.short_name
    if before.name != after.name or not is_same_kernel:
        names = [node.name if is_same_kernel else node.short_name for node in (before, after)]
        yield Change(field=NAMES[after.kind != "kernel"], before=names[0], after=names[1])
    yield from changed(dict(_facts(before)), dict(_facts(after)))
    if is_same_kernel:  # another kernel's arguments are other things
        yield from changed(dict(_arguments(before)), dict(_arguments(after)))


def changed(before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    """The facts whose text differs, in the order of after."""
    for name in {**after, **before}:
        was, is_now = before.get(name, ""), after.get(name, "")
        if was != is_now:
            yield Change(field=name, before=was, after=is_now)


def _facts(node: Node) -> Iterator[tuple[str, str]]:
    yield "module", node.module
    yield "op", node.op
    yield "grid", extent(node.grid)
    yield "block", extent(node.block)
    yield "cluster", extent(node.cluster)
    yield "shared memory", f"{node.shared_memory_bytes} bytes"
    yield "registers", f"{node.registers}"
    yield from ((f"attribute {name}", value) for name, value in node.attributes.items())


def _arguments(node: Node) -> Iterator[tuple[str, str]]:
    for place, argument in enumerate(node.arguments):
        yield f"argument {place} {argument.name}".rstrip(), _argument_text(argument)


def _argument_text(argument: Argument) -> str:
    """What an argument says, with what its addresses lead to instead of the addresses."""
    places = ", ".join(map(_place, argument.pointers))
    if argument.kind == "pointer":
        return places or "pointer"
    said = [at for p in argument.pointers if p.name and (at := argument.text.find(p.name)) >= 0]
    if said:  # a text ends with the names of its pointers
        return argument.text[: min(said)] + places
    return f"{argument.text} ({places})" if places else argument.text


def _place(pointer: Pointer) -> str:
    """Where in the pool is the allocator's choice, which moves with every size."""
    if pointer.memory == "pool":
        return pointer.memory
    name = _ADDRESS.sub("", pointer.name).strip()
    return name if name.startswith(pointer.memory) else f"{pointer.memory} {name}".rstrip()


def extent(shape: tuple[int, ...]) -> str:
    """Such as ``8x1x1``."""
    return "x".join(map(str, shape))
