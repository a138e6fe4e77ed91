"""Pairing of the nodes of two graphs, and comparison of a pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise, zip_longest

from graphkit.records import Argument, FieldChange, Node, Pointer, extent
from graphkit.views.diff.alignment import align

NodePair = tuple[Node, Node]
NAME_FIELDS = ("kernel", "name")
"""Fields of a change that replaces the node's kernel, or the name of any other node."""
_Key = Callable[[Node], Hashable]
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}")
"""Long enough to be an address; shorter ones are offsets into named memory."""


def pair_nodes(before: Sequence[Node], after: Sequence[Node]) -> list[NodePair]:
    """Pair the nodes that both graphs contain, in order.

    First pair equal kernels of equal operations. Between two of those pairs, pair equal
    operations with different kernels; between two of those, equal kernels of different modules.
    """
    return list(_paired(before, after, (_kernel_and_operation, _operation, _kernel)))


def _paired(
    before: Sequence[Node], after: Sequence[Node], keys: Sequence[_Key]
) -> Iterator[NodePair]:
    if not keys or not before or not after:
        return
    pairs = align(*([keys[0](node) for node in nodes] for nodes in (before, after)))
    for (i, j), (i_next, j_next) in pairwise([(-1, -1), *pairs, (len(before), len(after))]):
        yield from _paired(before[i + 1 : i_next], after[j + 1 : j_next], keys[1:])
        if i_next < len(before):
            yield before[i_next], after[j_next]


def _kernel_and_operation(node: Node) -> Hashable:
    return node.module, node.op, node.kind, node.short_name


def _operation(node: Node) -> Hashable:
    return node.module, node.op, node.kind


def _kernel(node: Node) -> Hashable:
    return node.kind, node.short_name


def node_changes(before: Node, after: Node) -> Iterator[FieldChange]:
    """Yield the fields of a node that differ, source line and duration left out."""
    is_same_kernel = before.short_name == after.short_name
    if before.name != after.name or not is_same_kernel:
        names = [node.name if is_same_kernel else node.short_name for node in (before, after)]
        field = NAME_FIELDS[after.kind != "kernel"]
        yield FieldChange(field=field, before=names[0], after=names[1])
    yield from field_changes(dict(_launch(before)), dict(_launch(after)))
    if is_same_kernel:  # arguments of different kernels do not correspond
        yield from field_changes(*_arguments(before, after))


def field_changes(before: dict[str, str], after: dict[str, str]) -> Iterator[FieldChange]:
    """Yield the fields whose text differs, in the order of ``after``."""
    for name in {**after, **before}:
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            yield FieldChange(field=name, before=old, after=new)


def _launch(node: Node) -> Iterator[tuple[str, str]]:
    yield "module", node.module
    yield "op", node.op
    yield "grid", extent(node.grid)
    yield "block", extent(node.block)
    yield "cluster", extent(node.cluster)
    yield "shared memory", f"{node.shared_memory_bytes} bytes"
    yield "registers", f"{node.registers}"
    yield from ((f"attribute {name}", value) for name, value in node.attributes.items())


def _arguments(*nodes: Node) -> Iterator[dict[str, str]]:
    """Yield the arguments of each node as text; one of the nodes may lack the names."""
    pairs = list(zip_longest(*(node.arguments for node in nodes)))
    names = [next((arg.name for arg in pair if arg and arg.name), "") for pair in pairs]
    unset = {at for at, pair in enumerate(pairs) if not names[at] and any(map(_is_unset, pair))}
    for node in nodes:
        yield {
            f"argument {index} {names[index]}".rstrip(): _argument_text(argument)
            for index, argument in enumerate(node.arguments)
            if index not in unset
        }


def _is_unset(argument: Argument | None) -> bool:
    """Return True for one byte that is not a flag.

    Compilers pass a functor without members as one byte, which nothing sets.
    """
    if argument is None or argument.kind != "number" or argument.size != 1:
        return False
    return argument.text not in ("0", "1")


def _argument_text(argument: Argument) -> str:
    """Return an argument's text with the targets of its pointers instead of addresses."""
    targets = ", ".join(map(_target, argument.pointers))
    if argument.kind == "pointer":
        return targets or "pointer"
    starts = [at for p in argument.pointers if p.name and (at := argument.text.find(p.name)) >= 0]
    if starts:  # a text ends with the names of its pointers
        return argument.text[: min(starts)] + targets
    return f"{argument.text} ({targets})" if targets else argument.text


def _target(pointer: Pointer) -> str:
    """Return what a pointer points to, without the offset in the pool, which differs by size."""
    if pointer.memory == "pool":
        return pointer.memory
    name = _ADDRESS.sub("", pointer.name).strip()
    return name if name.startswith(pointer.memory) else f"{pointer.memory} {name}".rstrip()
