"""Times, gaps and branches along a replay, the same wherever they are shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from graphkit.records import Edge, GraphRecord, Node, figure_heading, figure_name, load_record
from graphkit.views import capture_view, diff_view
from graphkit.views.diff import diff_records
from graphkit.views.formatting import time_facts, us
from graphkit.views.html import drawing
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.initial import first_page, graph_groups
from graphkit.views.pages.timeline import node_branches, timeline_page
from graphkit.views.selection import named_graphs

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def step():
    """The record of an 8B step."""
    return load_record(DATA / "h200-8b-step.json")


def test_what_the_profiler_adds_is_said(step):
    facts = dict(time_facts(step.graphs[0]))
    assert facts["unprofiled"] == "4,807.12 us"
    assert facts["profiled"] == "p50 4,818.80 us, p95 4,825.69 us"
    assert facts["the profiler adds"] == "11.67 us"
    assert next(iter(facts)) == "unprofiled", "the time that is true comes first"


def test_a_replay_that_the_profiler_does_not_slow_down_has_no_such_fact(step):
    (graph,) = step.graphs
    timing = dataclasses.replace(graph.timing, unprofiled_us=4900.0)
    assert "the profiler adds" not in dict(time_facts(dataclasses.replace(graph, timing=timing)))


def test_a_time_that_an_older_release_did_not_measure_is_said_to_be_missing():
    graph = load_record(DATA / "h200-tree.json").graphs[0]
    assert dict(time_facts(graph))["unprofiled"] == "not measured"
    assert dict(time_facts(dataclasses.replace(graph, timing=None))) == {"times": "not measured"}


def test_gaps_are_equal_on_the_page_the_timeline_its_rows_and_the_html(step):
    (group,) = graph_groups(step)
    (graph,) = step.graphs
    page, timeline = graph_page(group, 0), timeline_page(group, 0)
    gap_us = graph.timeline.gap_us
    assert dict(page.facts)["gaps"] == dict(timeline.facts)["gaps"] == f"{us(gap_us)} us (1%)"
    column = [each.name for each in timeline.columns].index("gap us")
    assert sum(row.values[column] or 0.0 for row in timeline.rows) == pytest.approx(gap_us)
    (drawn,) = drawing(named_graphs(step))
    assert sum(gap for _, _, gap, _ in drawn["bars"]) == pytest.approx(gap_us, abs=0.05)
    assert f"{us(gap_us)} us" in drawn["summary"]
    assert dict(drawn["facts"]).items() >= dict(time_facts(graph)).items()


def test_the_time_of_a_call_and_the_profiled_time_have_different_names(step):
    columns = {each.name for each in first_page(step).columns}
    assert figure_heading("replay_us") in columns
    assert "replay" not in dict(graph_page(graph_groups(step)[0], 0).facts)
    assert len({figure_name(each) for each in ("replay_us", "unprofiled_us", "p50_us")}) == 3


def test_tables_and_differences_have_the_same_names(capture, text):
    shown = text(diff_view(diff_of(capture)), 120)
    assert figure_heading("p50_us") in shown
    assert figure_heading("replay_us") in text(capture_view(capture), 160)


def diff_of(capture):
    later = dataclasses.replace(
        capture.graphs[0], timing=dataclasses.replace(capture.graphs[0].timing, p50_us=1.0)
    )
    return diff_records(capture, dataclasses.replace(capture, graphs=(later, *capture.graphs[1:])))


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
