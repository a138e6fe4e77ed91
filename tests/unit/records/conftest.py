"""Small graphs from one row of text per node."""

from __future__ import annotations

import pytest

from graphkit.records import Edge, Environment, GraphRecord, Node

ENVIRONMENT = Environment(
    device="NVIDIA H200", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580.1", graphkit="1"
)


def node_of(index, row):
    """A row is ``module op kernel``, or a mapping of the node's fields."""
    if isinstance(row, str):
        module, op, short_name = row.split()
        row = {"module": module.strip("-"), "op": op.strip("-"), "short_name": short_name}
    facts = {"kind": "kernel", "name": f"{row['short_name']}()", "grid": (8, 1, 1), **row}
    return Node(index=index, **facts)


@pytest.fixture(scope="session")
def make_graph():
    """``make_graph(*rows)``: each node waits for the one before it, unless ``edges`` says else."""

    def make(*rows, name="TARGET_VERIFY 8", edges=None, **facts):
        chain = tuple(Edge(source=i, target=i + 1) for i in range(len(rows) - 1))
        return GraphRecord(
            name=name,
            backend="cuda",
            environment=facts.pop("environment", ENVIRONMENT),
            nodes=tuple(node_of(index, row) for index, row in enumerate(rows)),
            edges=chain if edges is None else edges,
            **facts,
        )

    return make
