"""Small graph records."""

from __future__ import annotations

import pytest

from graphkit.records import Environment, GraphRecord, Node


@pytest.fixture
def graph_of():
    """Return ``graph_of(name)``, which makes a small record of a graph."""

    def make(name):
        environment = Environment(
            device="a device", torch="2", triton="3", cuda="13", driver="580", graphkit="0"
        )
        node = Node(index=0, kind="kernel", name="f(int)", short_name="f")
        return GraphRecord(name=name, backend="cuda", environment=environment, nodes=(node,))

    return make
