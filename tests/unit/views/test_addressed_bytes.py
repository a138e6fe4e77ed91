"""Bytes of the tensors that nodes address."""

from __future__ import annotations

import pytest

from graphkit.records import Argument, Node, Pointer
from graphkit.views.addressed_bytes import addressed_bytes


def node(*spans):
    """A node with an argument for each (address, size)."""
    arguments = tuple(
        Argument(
            size=8, kind="pointer", text="x",
            pointers=(Pointer(address=address, memory="weight", name="x", size=size),),
        )
        for address, size in spans
    )  # fmt: skip
    return Node(index=0, kind="kernel", name="k", short_name="k", arguments=arguments)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node((64, 8))], 8),
        ([node((64, 8), (128, 16))], 24),
        ([node((64, 8), (64, 8))], 8),
        ([node((64, 16), (72, 16))], 24),
        ([node((64, 100), (72, 16), (150, 50))], 136),
        ([node((64, 8)), node((64, 8))], 16),
        ([node()], None),
        ([node((64, 8), (128, 0))], None),
        ([node((64, 8)), node((128, 0))], None),
        ([], None),
    ],
)
def test_distinct_bytes_of_each_node_are_summed(nodes, expected):
    assert addressed_bytes(nodes) == expected
