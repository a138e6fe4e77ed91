"""Bytes of the tensors that nodes address."""

from __future__ import annotations

from collections.abc import Sequence

from graphkit.records import Node


def addressed_bytes(nodes: Sequence[Node]) -> int | None:
    """Return the bytes of all tensors that the nodes' arguments point to, summed over the nodes.

    A node may read a part of a tensor, such as some rows of an embedding or of a KV pool, so this
    is an upper bound of the distinct bytes that it reads and writes. Within a node, bytes that
    several arguments point to count once, even if the node reads and writes them.

    Returns:
        ``None`` if a node has no pointers, or if the size behind one of them is not in the record.
    """
    each = [_bytes_of(node) for node in nodes]
    known = [size for size in each if size is not None]
    return sum(known) if known and len(known) == len(each) else None


def unknown_bytes_reason(nodes: Sequence[Node]) -> str:
    """Return why ``addressed_bytes`` is unknown, as a clause; empty if it is known."""
    for node in nodes:
        pointers = [pointer for argument in node.arguments for pointer in argument.pointers]
        if not pointers:
            return f"no argument of #{node.index} is known to be a pointer"
        unsized = next((pointer for pointer in pointers if not pointer.size), None)
        if unsized:
            where = unsized.name or unsized.memory
            return f"the record has no tensor for {where}, which #{node.index} points to"
    return ""


def _bytes_of(node: Node) -> int | None:
    pointers = [pointer for argument in node.arguments for pointer in argument.pointers]
    if not all(pointer.size for pointer in pointers):
        return None
    end = total = 0
    for begin, size in sorted((pointer.address, pointer.size) for pointer in pointers):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total or None
