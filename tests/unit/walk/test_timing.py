"""What was measured finds its nodes, and is added up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkit.graphs.walk.node_order import critical_path
from graphkit.graphs.walk.timing import Span, with_times
from graphkit.records import Edge, Node

FUZZ = settings(deadline=None, derandomize=True, max_examples=200)
GRID = (4, 1, 1)


def nodes_of(*names):
    """Nodes in their order, each given as it is or as a kernel's name."""
    made = [of_kind("kernel", each, GRID) if isinstance(each, str) else each for each in names]
    return [replace(node, index=i) for i, node in enumerate(made)]


def of_kind(kind, name, grid=()):
    return Node(index=0, kind=kind, name=name, short_name=name, grid=grid)


def launch(*runs, at=1_000_000):
    """Spans of (name, start, duration) or with a grid; starts count from ``at``."""
    return [Span(n, grid[0] if grid else GRID, at + s, d) for n, s, d, *grid in runs]


def edges(*pairs):
    return [Edge(source=a, target=b) for a, b in pairs]


def times(nodes):
    return [(node.start_us, node.duration_us) for node in nodes]


def test_spans_in_order_are_bound_by_order():
    nodes = nodes_of("a", "b", "a")
    runs = launch(("a", 0, 1000), ("b", 1500, 500), ("a", 2000, 3000))
    made, whole = with_times(nodes, edges((0, 1), (1, 2)), [runs])
    assert times(made) == [(0.0, 1.0), (1.5, 0.5), (2.0, 3.0)]
    assert (whole.bound_by, whole.replays) == ("order", 1)
    assert (whole.p50_us, whole.p95_us, whole.busy_us, whole.gap_us) == (5.0, 5.0, 4.5, 0.5)
    assert (whole.critical_path, whole.critical_us) == ((0, 1, 2), 4.5)


def test_a_node_has_the_median_over_replays_from_each_ones_start():
    runs = [launch(("a", 0, d), ("b", d + gap, 10), at=at) for at, d, gap in
            [(0, 1000, 0), (9000, 5000, 0), (50_000, 2000, 300)]]  # fmt: skip
    made, whole = with_times(nodes_of("a", "b"), (), runs)
    assert times(made) == [(0.0, 2.0), (2.3, 0.01)]
    assert whole.p50_us == 2.31


def test_branches_are_bound_by_name_and_grid():
    wide, narrow = (64, 1, 1), (2, 1, 1)
    nodes = nodes_of(of_kind("kernel", "a", wide), of_kind("kernel", "a", narrow), "b")
    runs = launch(("a", 0, 10, narrow), ("b", 5, 30), ("a", 7, 20, wide))
    made, whole = with_times(nodes, (), [runs])
    assert [node.duration_us for node in made] == [0.02, 0.01, 0.03]
    assert whole.bound_by == "name and grid"


def test_alike_nodes_take_their_spans_in_the_order_of_starts():
    nodes = nodes_of("a", "b", "a")
    made, _ = with_times(nodes, (), [launch(("b", 0, 10), ("a", 5, 20), ("a", 30, 40))])
    assert [node.duration_us for node in made] == [0.02, 0.01, 0.04]


def test_branches_are_bound_by_name_where_the_profiler_gives_no_grid():
    made, whole = with_times(nodes_of("a", "b"), (), [launch(("b", 0, 10, ()), ("a", 5, 20, ()))])
    assert [node.duration_us for node in made] == [0.02, 0.01]
    assert whole.bound_by == "name and grid"


def test_a_node_that_nothing_measured_is_like_has_no_time():
    made, _ = with_times(
        nodes_of("a", "b", "c"), (), [launch(("b", 0, 9), ("x", 5, 8), ("a", 6, 7))]
    )
    assert [node.duration_us for node in made] == [0.007, 0.009, None]


def test_copies_and_fills_are_known_by_their_kind():
    nodes = nodes_of(
        of_kind("memcpy", "memcpy of 8 bytes"), "k", of_kind("memset", "memset of 4 bytes")
    )
    spans = {"copy": ("Memcpy DtoD (Device -> Device)", ()), "fill": ("Memset (Device)", ())}
    in_order = launch((spans["copy"][0], 0, 1, ()), ("k", 1, 2), (spans["fill"][0], 3, 4, ()))
    made, whole = with_times(nodes, (), [in_order])
    assert [node.duration_us for node in made] == [0.001, 0.002, 0.004]
    assert whole.bound_by == "order"
    mixed = launch((spans["fill"][0], 0, 4, ()), (spans["copy"][0], 3, 1, ()), ("k", 9, 2))
    made, whole = with_times(nodes, (), [mixed])
    assert [node.duration_us for node in made] == [0.001, 0.002, 0.004]
    assert whole.bound_by == "name and grid"


def test_nodes_that_run_nothing_have_no_times():
    nodes = nodes_of("a", of_kind("empty", "empty"), of_kind("event record", "event record"), "b")
    made, _ = with_times(nodes, (), [launch(("a", 0, 1000), ("b", 2000, 1000))])
    assert times(made) == [(0.0, 1.0), (None, None), (None, None), (2.0, 1.0)]


def test_a_launch_of_something_else_is_left_out():
    nodes = nodes_of("a", "b")
    whole_one = launch(("a", 0, 1000), ("b", 1000, 1000))
    made, whole = with_times(
        nodes, (), [launch(("a", 0, 5000)), whole_one, [*whole_one, *whole_one]]
    )
    assert whole.replays == 1
    assert times(made) == [(0.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("launches", [[], [launch(("a", 0, 1))], [[]]])
def test_without_a_launch_of_the_graph_nothing_is_said(launches):
    nodes = nodes_of("a", "b")
    assert with_times(nodes, (), launches) == (tuple(nodes), None)
    assert with_times([], (), [[]]) == ((), None)


def test_time_in_which_several_ran_counts_once():
    runs = launch(("a", 0, 1000), ("b", 200, 300), ("c", 800, 700), ("d", 2000, 500))
    _, whole = with_times(nodes_of("a", "b", "c", "d"), (), [runs])
    assert (whole.p50_us, whole.busy_us, whole.gap_us) == (2.5, 2.0, 0.5)


def test_a_replay_ends_when_its_last_node_does():
    runs = launch(("a", 0, 9000), ("b", 100, 50))
    assert with_times(nodes_of("a", "b"), (), [runs])[1].p50_us == 9.0


replays = st.lists(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=3, max_size=3),
    min_size=1,
    max_size=9,
)


@given(replays)
@FUZZ
def test_the_whole_is_that_of_replays_that_were(drawn):
    runs = [launch(*(("a", s, d) for s, d in sorted(each))) for each in drawn]
    _, whole = with_times(nodes_of("a", "a", "a"), (), runs)
    measured = [(max(s.end for s in run) - run[0].start) / 1e3 for run in runs]
    assert min(measured) <= whole.p50_us <= whole.p95_us <= max(measured)
    assert whole.busy_us + whole.gap_us == pytest.approx(whole.p50_us)
    assert whole.gap_us >= 0


def test_the_p95_of_many_replays_leaves_the_slowest_out():
    runs = [launch(("a", 0, 1000 * i)) for i in range(1, 101)]
    whole = with_times(nodes_of("a"), (), runs)[1]
    assert 95.0 <= whole.p95_us < 97.0
    assert 50.0 <= whole.p50_us <= 51.0


def weighed(*durations):
    nodes = nodes_of(*"abcdef"[: len(durations)])
    return [replace(node, duration_us=d) for node, d in zip(nodes, durations, strict=True)]


def test_the_critical_path_of_a_diamond_goes_its_longer_way():
    diamond = edges((0, 1), (0, 2), (1, 3), (2, 3))
    assert critical_path(weighed(1.0, 5.0, 2.0, 1.0), diamond) == (0, 1, 3)
    assert critical_path(weighed(1.0, 2.0, 5.0, 1.0), diamond) == (0, 2, 3)


def test_the_critical_path_passes_nodes_that_were_not_measured():
    assert critical_path(weighed(1.0, None, 3.0, 9.0), edges((0, 1), (1, 2))) == (3,)
    assert critical_path(weighed(8.0, None, 3.0, 9.0), edges((0, 1), (1, 2))) == (0, 1, 2)
    assert critical_path([], []) == ()


def test_an_edge_may_lead_to_a_node_that_was_made_earlier():
    assert critical_path(weighed(1.0, 2.0, 4.0), edges((2, 0), (0, 1))) == (2, 0, 1)


CHILD = of_kind("child graph", "child graph")


def within(parent, *nodes):
    return [replace(node, parent=parent) for node in nodes]


def test_the_critical_path_goes_through_what_a_node_holds():
    a, child, c, d, first, second = weighed(1.0, None, 1.0, 3.0, 2.0, 3.0)
    nodes = [a, child, c, d, *within(1, first, second)]
    fork = edges((0, 1), (1, 2), (0, 3), (4, 5))
    assert critical_path(nodes, fork) == (0, 1, 4, 5, 2)
    assert critical_path(nodes, fork[:-1]) == (0, 1, 5, 2), "of two at once the longer one"
    assert critical_path([a, child, c, replace(d, duration_us=9.0), *nodes[4:]], fork) == (0, 3)
    unmeasured = [*nodes[:5], replace(second, parent=1, duration_us=None)]
    assert critical_path(unmeasured, edges((0, 1), (1, 2), (4, 5))) == (0, 1, 4, 5, 2)


def test_the_critical_path_goes_through_children_of_children():
    a, outer, c, inner, last, deep = weighed(1.0, None, 1.0, None, 2.0, 3.0)
    nodes = [a, outer, c, *within(1, inner, last), *within(3, deep)]
    assert critical_path(nodes, edges((0, 1), (1, 2), (3, 4))) == (0, 1, 3, 5, 4, 2)
    assert critical_path(nodes, edges((0, 1), (1, 2))) == (0, 1, 3, 5, 2)


def test_the_time_of_what_a_node_holds_counts():
    inner = replace(of_kind("kernel", "c", GRID), parent=1)
    nodes = nodes_of("a", CHILD, "b", inner)
    runs = launch(("a", 0, 1000), ("c", 1000, 5000), ("b", 6000, 2000))
    made, whole = with_times(nodes, edges((0, 1), (1, 2)), [runs])
    assert (whole.critical_path, whole.critical_us) == ((0, 1, 3, 2), 8.0)
    assert [node.duration_us for node in made] == [1.0, None, 2.0, 5.0]
    assert whole.bound_by == "order"


def test_a_kernel_in_a_child_graph_runs_in_its_place():
    """Also where all of them look alike, so that no order but this tells them apart."""
    inner = replace(of_kind("kernel", "a", GRID), parent=1)
    nodes = nodes_of("a", CHILD, "a", inner, inner)
    runs = launch(*(("a", 1000 * i, 100 * (i + 1)) for i in range(4)))
    made, _ = with_times(nodes, edges((0, 1), (1, 2), (3, 4)), [runs])
    assert [node.duration_us for node in made] == [0.1, None, 0.4, 0.2, 0.3]
