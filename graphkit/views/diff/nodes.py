"""Pairing of the nodes of two graphs, and comparison of a pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise, takewhile, zip_longest

from graphkit.records import Argument, FieldChange, Node, Pointer, extent

MAX_EDITS = 1500
"""Sequences with more edits between them are not aligned; the work grows with its square."""

_Run = tuple["_Run | None", int, int, int]
"""The run before, a position in either sequence, and the number of pairs from there on."""
NodePair = tuple[Node, Node]
NAME_FIELDS = ("kernel", "name")
"""Fields of a change that replaces the node's kernel, or the name of any other node."""
_Key = Callable[[Node], Hashable]
_KEYS: tuple[_Key, ...] = (
    lambda node: (node.module, node.op, node.kind, node.short_name),
    lambda node: (node.module, node.op, node.kind),
    lambda node: (node.kind, node.short_name),
)
"""Kernel and operation, operation, and kernel of a node."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}")
"""Long enough to be an address; shorter ones are offsets into named memory."""


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pair the positions of equal keys, in order, as many as possible.

    Myers, "An O(ND) difference algorithm and its variations", 1986. ``difflib`` pairs fewer, and
    takes minutes where few keys repeat often, as the kernels of equal layers do.

    Returns:
        Ascending pairs; none if aligning the keys that both sequences contain takes more than
        ``MAX_EDITS`` edits.
    """
    common = set(before) & set(after)
    left = [position for position, key in enumerate(before) if key in common]
    right = [position for position, key in enumerate(after) if key in common]
    run = _last_run([before[i] for i in left], [after[j] for j in right])
    pairs: list[tuple[int, int]] = []
    while run is not None:  # from the last run to the first
        run, i, j, length = run
        pairs += [(left[i + step], right[j + step]) for step in reversed(range(length))]
    return pairs[::-1]


def _last_run(before: Sequence[Hashable], after: Sequence[Hashable]) -> _Run | None:
    """Extend every path by one edit at a time until one reaches both ends."""
    furthest: dict[int, tuple[int, _Run | None]] = {1: (0, None)}
    for edits in range(MAX_EDITS):
        for diagonal in range(-edits, edits + 1, 2):
            inserts = diagonal == -edits or (
                diagonal != edits and furthest[diagonal - 1][0] < furthest[diagonal + 1][0]
            )
            start, run = furthest[diagonal + 1] if inserts else furthest[diagonal - 1]
            start += not inserts
            end = _run_end(before, after, start, start - diagonal)
            if end > start:
                run = (run, start, start - diagonal, end - start)
            furthest[diagonal] = end, run
            if end >= len(before) and end - diagonal >= len(after):
                return run
    return None


def _run_end(before: Sequence[Hashable], after: Sequence[Hashable], i: int, j: int) -> int:
    while i < len(before) and j < len(after) and before[i] == after[j]:
        i, j = i + 1, j + 1
    return i


def pair_nodes(before: Sequence[Node], after: Sequence[Node]) -> list[NodePair]:
    """Pair the nodes that both graphs contain, in order.

    First pair equal kernels of equal operations. Between two of those pairs, pair equal
    operations with different kernels; between two of those, equal kernels of different modules.
    """
    return list(_paired(before, after, _KEYS))


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


def node_changes(before: Node, after: Node) -> Iterator[FieldChange]:
    """Yield the fields of a node that differ, source line and duration left out."""
    is_same_kernel = before.short_name == after.short_name
    if before.name != after.name or not is_same_kernel:
        names = [node.name if is_same_kernel else node.short_name for node in (before, after)]
        field = NAME_FIELDS[after.kind != "kernel"]
        yield FieldChange(field=field, before=names[0], after=names[1])
    yield from field_changes(dict(_launch(before)), dict(_launch(after)))
    if is_same_kernel:  # arguments of different kernels do not correspond
        arguments, others = _arguments(before, after)
        old, new = moved(before.module, after.module)
        if old:  # weights move along with their module
            arguments = {name: text.replace(old, new) for name, text in arguments.items()}
        yield from field_changes(arguments, others)


def moved(before: str, after: str) -> tuple[str, str]:
    """Return two paths without the names at their ends that are equal; the first names stay."""
    old, new = before.split("."), after.split(".")
    pairs = zip(old[:0:-1], new[:0:-1], strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ".".join(old[: len(old) - equal]), ".".join(new[: len(new) - equal])


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
