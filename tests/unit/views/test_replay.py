"""Branches of a replay are those of the graph."""

from __future__ import annotations

import pytest

from graphkit.records import Edge, GraphRecord, Node
from graphkit.views.pages.timeline import node_branches


@pytest.fixture
def make(graph):
    """``make(times, edges)``: nodes by start and duration, or ``None``, and pairs of them."""

    def graph_of(times, edges=()):
        nodes = [
            Node(
                index=index, kind="kernel", name="k", short_name="k",
                start_us=time and float(time[0]), duration_us=time and float(time[1]),
            )
            for index, time in enumerate(times)
        ]  # fmt: skip
        return GraphRecord(
            name="g", backend="cuda", environment=graph.environment, nodes=tuple(nodes),
            edges=tuple(Edge(source=source, target=target) for source, target in edges),
        )  # fmt: skip

    return graph_of


def test_a_chain_is_one_branch_even_if_its_nodes_overlap(make):
    times = [(0, 10), (4, 10), (9, 3)]
    assert node_branches(make(times, [(0, 1), (1, 2)])) == [0, 0, 0]


def test_a_fork_has_two_branches_and_its_join_continues_the_first(make):
    times = [(0, 2), (2, 8), (3, 4), (7, 2), (10, 1)]
    edges = [(0, 1), (0, 2), (2, 3), (1, 4), (3, 4)]
    assert node_branches(make(times, edges)) == [0, 0, 1, 1, 0]


def test_without_edges_nodes_that_run_together_are_on_branches_of_their_own(make):
    assert node_branches(make([(0, 10), (1, 10), (2, 3), (12, 1)])) == [0, 1, 2, 0]


def test_an_overlap_of_up_to_half_a_node_is_no_second_branch(make):
    assert node_branches(make([(0, 10), (9, 2)])) == [0, 0]
    assert node_branches(make([(0, 10), (8.5, 2)])) == [0, 1]


def test_nodes_without_a_time_have_no_branch(make):
    record = make([None, (0, 1), (float("nan"), 1), (1e13, 1), (0, float("inf"))])
    assert node_branches(record) == [None, 0, None, None, None]
    assert record.timeline.gaps == ()
