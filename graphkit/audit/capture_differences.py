"""Byte differences between captures of the same step, and bytes that carry no meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphkit.audit.audit_log import argument_text
from graphkit.audit.canonical_nodes import CanonicalArgument, CanonicalNode
from graphkit.graphs.host_memory import UNSET_MARKER
from graphkit.graphs.walk.arguments import has_short_form, number_text
from graphkit.graphs.walk.kernels import short_name
from graphkit.records import Node


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """A difference between two captures of the same step.

    Attributes:
        node: Index of the node; for ``number of nodes`` the first index that only one capture has.
        what: ``kernel``, ``grid``, ``block``, ``cluster``, ``shared memory``, ``attributes``,
            ``argument`` or ``number of nodes``.
        before, after: Both values, decoded.
        argument: Index of the argument; ``None`` if the difference is in none.
        offset: Offset in the argument, in bytes; ``None`` where it has none.
        is_memory: Whether the captures read different memory that neither of them allocated.
    """

    node: int
    what: str
    before: str
    after: str
    argument: int | None = None
    offset: int | None = None
    is_memory: bool = False

    def is_repeated_in(self, others: Sequence[CaptureDifference]) -> bool:
        """Return whether other captures differ alike.

        What replaces memory may make it anew each time, so that its address and contents vary.
        """
        if not self.is_memory:
            return self in others
        places = ((d.node, d.argument, d.offset) for d in others if d.is_memory)
        return (self.node, self.argument, self.offset) in places

    def is_address(self, nodes: Sequence[Node]) -> bool:
        """Return whether an address differs, of memory that is live or that was freed."""
        if self.is_memory or self.argument is None or self.offset is None:
            return self.is_memory
        pointers = nodes[self.node].arguments[self.argument].pointers
        return any(pointer.offset <= self.offset < pointer.offset + 8 for pointer in pointers)

    def facts(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """Return what ``Check.report`` takes to name what differs, and where."""
        return {
            "node": nodes[self.node] if self.node < len(nodes) else None,
            "argument": self.argument,
            "offset": self.offset,
            "before": self.before,
            "after": self.after,
        }


UnsetBytes = Mapping[tuple[int, int], frozenset[int]]
"""Offsets of bytes that torch leaves unset, by indices of node and argument."""


def differing_bytes(*captures: Sequence[CanonicalNode]) -> UnsetBytes:
    """Return the bytes in which equal captures differ from the first one."""
    offsets: dict[tuple[int, int], frozenset[int]] = {}
    first, *others = captures
    for other in others:
        for key, before, after in _differing_arguments(first, other):
            offsets[key] = offsets.get(key, frozenset()) | _differing_offsets(before, after)
    return offsets


def filled_bytes(zeros: Sequence[CanonicalNode], marked: Sequence[CanonicalNode]) -> UnsetBytes:
    """Return the bytes that hold the fill of the stack.

    Args:
        zeros: A capture with the stack filled with zeros.
        marked: The same capture with the stack filled with ``UNSET_MARKER``.
    """
    return {
        key: frozenset(i for i in _differing_offsets(before, after) if after[i] == UNSET_MARKER)
        for key, before, after in _differing_arguments(zeros, marked)
    }


def _differing_arguments(
    before: Sequence[CanonicalNode], after: Sequence[CanonicalNode]
) -> Iterator[tuple[tuple[int, int], bytes, bytes]]:
    """Yield node and argument, and the bytes in both captures, where these differ."""
    for node, nodes in enumerate(zip(before, after, strict=False)):
        arguments = zip(nodes[0].arguments, nodes[1].arguments, strict=False)
        for argument, (one, other) in enumerate(arguments):
            one_data, other_data = one.data, other.data
            if isinstance(one_data, str) or isinstance(other_data, str):
                continue
            if one_data != other_data:
                yield (node, argument), one_data, other_data


def capture_differences(
    before: Sequence[CanonicalNode], after: Sequence[CanonicalNode], unset: UnsetBytes
) -> Iterator[CaptureDifference]:
    """Yield the differences between two captures, in the order of their nodes."""
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one == other:
            continue
        if one.name != other.name or len(one.arguments) != len(other.arguments):
            yield CaptureDifference(index, "kernel", short_name(one.name), short_name(other.name))
            continue
        for (what, value), (_, new_value) in zip(one.launch, other.launch, strict=True):
            if value != new_value:
                yield CaptureDifference(index, what, value, new_value)
        for argument, both in enumerate(zip(one.arguments, other.arguments, strict=True)):
            ignored = unset.get((index, argument), frozenset())
            yield from _argument_differences(index, argument, *both, ignored)
    if len(before) != len(after):
        first = min(len(before), len(after))
        yield CaptureDifference(first, "number of nodes", str(len(before)), str(len(after)))


def comparable(differences: Sequence[CaptureDifference]) -> Iterator[CaptureDifference]:
    """Yield differences up to the first different kernel.

    There the captures took different branches, and the comparison pairs unrelated nodes.
    """
    for difference in differences:
        yield difference
        if difference.what == "kernel":
            return


def location(difference: CaptureDifference, nodes: Sequence[Node]) -> str:
    """Return where two captures differ, such as ``argument 1 of `mul` (node 4)``."""
    if difference.what == "number of nodes":
        return "the number of nodes"
    if difference.what == "kernel":
        return f"the kernel of node {difference.node}"
    if difference.argument is not None:
        node = nodes[difference.node]
        return argument_text(node, difference.argument, difference.offset or 0)
    return f"{difference.what} of `{node_name(difference, nodes)}` (node {difference.node})"


def node_name(difference: CaptureDifference, nodes: Sequence[Node]) -> str:
    """Return the short name of the node that differs; empty if only the second capture has it."""
    return nodes[difference.node].short_name if difference.node < len(nodes) else ""


def _argument_differences(
    node: int,
    argument: int,
    before: CanonicalArgument,
    after: CanonicalArgument,
    unset: frozenset[int],
) -> Iterator[CaptureDifference]:
    one, other = before.data, after.data
    if one == other:
        for constant, new in zip(before.constants, after.constants, strict=False):
            if not constant.is_same(new):
                values = constant.difference(new)
                yield CaptureDifference(node, "argument", *values, argument, is_memory=True)
        return
    if isinstance(one, str) or isinstance(other, str):
        yield CaptureDifference(node, "argument", str(one), str(other), argument)
        return
    width = 8 if not unset and _is_one_number(one, other) else 4
    offsets = _differing_offsets(one, other) - unset - _same_constants(before, after)
    addresses = {constant.offset for constant in (*before.constants, *after.constants)}
    for at in sorted({offset // width * width for offset in offsets}):
        values = number_text(one[at : at + width]), number_text(other[at : at + width])
        yield CaptureDifference(node, "argument", *values, argument, at, at in addresses)


def _same_constants(before: CanonicalArgument, after: CanonicalArgument) -> frozenset[int]:
    """Return the offsets of addresses that differ although they point to the same contents."""
    others = {constant.offset: constant for constant in after.constants}
    return frozenset(
        constant.offset + i
        for constant in before.constants
        if constant.offset is not None
        and constant.offset in others
        and constant.is_same(others[constant.offset])
        for i in range(8)
    )


def _is_one_number(one: bytes, other: bytes) -> bool:
    """Return whether eight bytes are one number, not two, or one beside four unset bytes."""
    both_halves_differ = one[:4] != other[:4] and one[4:] != other[4:]
    return len(one) == 8 and (both_halves_differ or (has_short_form(one) and has_short_form(other)))


def _differing_offsets(one: bytes, other: bytes) -> frozenset[int]:
    pairs = enumerate(zip(one, other, strict=False))
    return frozenset(i for i, (before, after) in pairs if before != after)
