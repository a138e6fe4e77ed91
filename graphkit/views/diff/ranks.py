"""Comparison of captures of several ranks: sizes, nodes and collectives in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from graphkit.records import CaptureRecord, Node

_COLLECTIVES = ("c10d::", "_c10d_functional::")
_NOTHING = "nothing more"


def launch_order(record: CaptureRecord) -> list[str]:
    """Return what all ranks must have in the same order, one text each.

    These are the sizes of each mode, then the nodes of each graph: module, operation, and the
    kernel or, on the recorder, the tensors of a collective. Values, memory and times may differ
    between ranks, and so may the kernel of any other operation.
    """
    return [*_sizes(record), *_nodes(record)]


def differing_launch(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the first texts of two ranks that differ; ``None`` if none does."""
    pairs = zip_longest(mine, others, fillvalue=_NOTHING)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _sizes(record: CaptureRecord) -> Iterator[str]:
    for mode in record.modes:
        sizes = ", ".join(str(size.batch_size) for size in mode.sizes)
        yield f"{mode.mode} at batch sizes {sizes or 'none'}"


def _nodes(record: CaptureRecord) -> Iterator[str]:
    for graph in record.graphs:
        for node in graph.nodes:
            place = f" in {node.module}" if node.module else ""
            yield f"node {node.index} of {graph.name}: {_action(node)}{place}"


def _action(node: Node) -> str:
    if not node.op:
        return node.short_name
    if not node.op.startswith(_COLLECTIVES):
        return f"{node.op} ({node.kind})"
    arguments = (argument for argument in node.arguments if argument.kind == "tensor")
    tensors = [argument.text.partition(" at ")[0] for argument in arguments]
    return f"{node.op} ({', '.join(tensors) or node.short_name})"
