"""Gaps are the times in which no node runs; the timeline has the only definition of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkit.records import Gap, Node, Timeline, load_record
from graphkit.views.diff import diff_graphs

DATA = Path(__file__).parents[2] / "data"


def nodes_of(*times):
    """Nodes by start and duration, or ``None`` for one that was not measured."""
    return [
        Node(
            index=index, kind="kernel", name="k", short_name="k",
            start_us=time and float(time[0]), duration_us=time and float(time[1]),
        )
        for index, time in enumerate(times)
    ]  # fmt: skip


def test_gaps_are_between_the_nodes_of_all_branches():
    timeline = Timeline.from_nodes(nodes_of((1, 2), (2, 6), (3, 1), (10, 1), (11, 1)))
    assert timeline.gaps == (Gap(0, 1, 0), Gap(8, 2, 3))
    assert (timeline.gap_us, timeline.busy_us, timeline.end_us) == (3, 9, 12)


def test_overlapping_nodes_count_once_as_busy():
    timeline = Timeline.from_nodes(nodes_of((0, 1.0), (0.2, 0.3), (0.8, 0.7), (2, 0.5)))
    assert (timeline.end_us, timeline.busy_us, timeline.gap_us) == (2.5, 2.0, 0.5)


def test_damaged_times_have_no_place():
    nodes = nodes_of(None, (float("nan"), 1), (1e13, 1), (0, float("inf")))
    timeline = Timeline.from_nodes(nodes)
    assert (timeline.nodes, timeline.gaps, timeline.end_us) == ((), (), 0)


def test_a_record_of_schema_2_is_read_and_its_gaps_are_those_of_its_nodes():
    graph = load_record(DATA / "h200-tree.json").graphs[0]
    timeline = graph.timeline
    assert graph.timing.unprofiled_us is None
    assert timeline.gap_us == pytest.approx(46.428)
    assert timeline.end_us == pytest.approx(362.958)
    longest = max(timeline.gaps, key=lambda gap: gap.us)
    assert (longest.node, longest.us) == (35, pytest.approx(0.416))


def test_differences_have_the_gaps_of_the_timeline():
    before, after = load_record(DATA / "h200-capture.json").graphs[:2]
    figures = {each.name: (each.before, each.after) for each in diff_graphs(before, after).figures}
    timelines = [graph.timeline for graph in (before, after)]
    assert figures["gap_us"] == tuple(each.gap_us for each in timelines)
    assert figures["busy_us"] == tuple(each.busy_us for each in timelines)
