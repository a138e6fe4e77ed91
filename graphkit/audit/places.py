"""Texts of the places that findings name: arguments of nodes, rows of fields, and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphkit.records import Mismatch, Node, distinct_text


def argument_text(node: Node, argument: int, offset: int = 0) -> str:
    """Return text such as ``argument 1 of `mul` (node 4)``.

    Args:
        node: The node.
        argument: Index of the argument.
        offset: Bytes from the beginning of the argument.
    """
    byte = f" at byte {offset}" if offset else ""
    return f"argument {argument}{byte} of `{node.short_name}` (node {node.index})"


def requests_text(batch_sizes: Sequence[int]) -> str:
    """Return ascending batch sizes as text, such as ``1 request`` or ``1 to 3, 5 requests``."""
    return f"{spans(batch_sizes)} request{'' if list(batch_sizes) == [1] else 's'}"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as ``1 to 3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def row_text(wrong: Mismatch, live: int) -> str:
    """Return text such as ``row 3 of next_token_logits (request 1 of 2)``.

    Args:
        wrong: A wrong row.
        live: Number of live requests.
    """
    return f"row {wrong.row} of {wrong.field} (request {wrong.request} of {live})"


def row_facts(wrong: Mismatch) -> dict[str, Any]:
    """Return what ``Check.report`` takes to name a wrong row and its two numbers."""
    before, after = distinct_text(wrong.expected, wrong.got)
    return {"row": wrong.row, "request": wrong.request, "before": before, "after": after}
