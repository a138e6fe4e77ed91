"""The composition of device loops as text."""

from __future__ import annotations

from graphkit.records import LoopRecord, count_of


def loop_text(loop: LoopRecord) -> str:
    """Return the composition of a loop on one line."""
    bodies = "; ".join(
        f"{index}: body of size {each.batch_size}, {count_of(each.num_nodes, 'node')}"
        for index, each in enumerate(loop.bodies)
    )
    inside = f"SWITCH size {{ {bodies} }}" if len(loop.bodies) > 1 else bodies.partition(": ")[2]
    prologue = f"prologue, {count_of(loop.prologue_nodes, 'node')}"
    return f"{loop.kind} loop: {prologue}; WHILE again {{ {inside} }}"
