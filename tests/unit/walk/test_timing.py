"""Assignment of measured spans to nodes, and times of whole graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from graphkit.graphs.walk.timing import Span, critical_path, with_times
from graphkit.records import Edge, Node

FUZZ = settings(deadline=None, derandomize=True, max_examples=200)
GRID = (4, 1, 1)


def nodes_of(*names):
    """Nodes in order, each given as a node or as the name of a kernel."""
    nodes = [of_kind("kernel", each, GRID) if isinstance(each, str) else each for each in names]
    return [replace(node, index=i) for i, node in enumerate(nodes)]


def of_kind(kind, name, grid=()):
    return Node(index=0, kind=kind, name=name, short_name=name, grid=grid)


def launch(*runs, at=1_000_000):
    """Spans of (name, start, duration[, grid]); starts are relative to ``at``."""
    return [Span(n, grid[0] if grid else GRID, at + s, d) for n, s, d, *grid in runs]


def edges(*pairs):
    return [Edge(source=a, target=b) for a, b in pairs]


def times(nodes):
    return [(node.start_us, node.duration_us) for node in nodes]


def test_spans_in_order_are_bound_by_order():
    nodes = nodes_of("a", "b", "a")
    runs = launch(("a", 0, 1000), ("b", 1500, 500), ("a", 2000, 3000))
    timed, timing = with_times(nodes, edges((0, 1), (1, 2)), [runs])
    assert times(timed) == [(0.0, 1.0), (1.5, 0.5), (2.0, 3.0)]
    assert (timing.bound_by, timing.replays) == ("order", 1)
    assert (timing.p50_us, timing.p95_us) == (5.0, 5.0)
    assert (timing.critical_path, timing.critical_us) == ((0, 1, 2), 4.5)


def test_the_times_of_a_node_are_medians_over_replays():
    runs = [launch(("a", 0, d), ("b", d + gap, 10), at=at) for at, d, gap in
            [(0, 1000, 0), (9000, 5000, 0), (50_000, 2000, 300)]]  # fmt: skip
    timed, timing = with_times(nodes_of("a", "b"), (), runs)
    assert times(timed) == [(0.0, 2.0), (2.3, 0.01)]
    assert timing.p50_us == 2.31


def test_a_kernel_that_starts_early_counts_from_the_end_of_the_one_it_waits_for():
    early = [replace(edge, kind="programmatic") for edge in edges((0, 1), (1, 2))]
    runs = launch(("a", 0, 1000), ("b", 100, 1900), ("c", 200, 2800))
    timed, timing = with_times(nodes_of("a", "b", "c"), early, [runs])
    assert times(timed) == [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)]
    assert (timing.p50_us, timing.critical_us) == (3.0, 3.0)
    overlapping, timing = with_times(nodes_of("a", "b", "c"), edges((0, 1), (1, 2)), [runs])
    assert times(overlapping) == [(0.0, 1.0), (0.1, 1.9), (0.2, 2.8)]


def test_a_kernel_that_starts_early_and_ends_first_has_no_time():
    early = [Edge(source=0, target=1, kind="programmatic")]
    runs = launch(("a", 0, 1000), ("b", 100, 500))
    assert times(with_times(nodes_of("a", "b"), early, [runs])[0]) == [(0.0, 1.0), (0.6, 0.0)]


def test_branches_are_bound_by_name_and_grid():
    wide, narrow = (64, 1, 1), (2, 1, 1)
    nodes = nodes_of(of_kind("kernel", "a", wide), of_kind("kernel", "a", narrow), "b")
    runs = launch(("a", 0, 10, narrow), ("b", 5, 30), ("a", 7, 20, wide))
    timed, timing = with_times(nodes, (), [runs])
    assert [node.duration_us for node in timed] == [0.02, 0.01, 0.03]
    assert timing.bound_by == "name and grid"


def test_equal_nodes_get_their_spans_in_order_of_start():
    nodes = nodes_of("a", "b", "a")
    timed, _ = with_times(nodes, (), [launch(("b", 0, 10), ("a", 5, 20), ("a", 30, 40))])
    assert [node.duration_us for node in timed] == [0.02, 0.01, 0.04]


def test_branches_are_bound_by_name_without_a_grid():
    timed, timing = with_times(nodes_of("a", "b"), (), [launch(("b", 0, 10, ()), ("a", 5, 20, ()))])
    assert [node.duration_us for node in timed] == [0.02, 0.01]
    assert timing.bound_by == "name and grid"


def test_a_node_without_a_matching_span_has_no_time():
    timed, _ = with_times(
        nodes_of("a", "b", "c"), (), [launch(("b", 0, 9), ("x", 5, 8), ("a", 6, 7))]
    )
    assert [node.duration_us for node in timed] == [0.007, 0.009, None]


def test_copies_and_fills_match_by_kind():
    nodes = nodes_of(
        of_kind("memcpy", "memcpy of 8 bytes"), "k", of_kind("memset", "memset of 4 bytes")
    )
    spans = {"copy": ("Memcpy DtoD (Device -> Device)", ()), "fill": ("Memset (Device)", ())}
    in_order = launch((spans["copy"][0], 0, 1, ()), ("k", 1, 2), (spans["fill"][0], 3, 4, ()))
    timed, timing = with_times(nodes, (), [in_order])
    assert [node.duration_us for node in timed] == [0.001, 0.002, 0.004]
    assert timing.bound_by == "order"
    mixed = launch((spans["fill"][0], 0, 4, ()), (spans["copy"][0], 3, 1, ()), ("k", 9, 2))
    timed, timing = with_times(nodes, (), [mixed])
    assert [node.duration_us for node in timed] == [0.001, 0.002, 0.004]
    assert timing.bound_by == "name and grid"


def test_nodes_without_device_work_have_no_times():
    nodes = nodes_of("a", of_kind("empty", "empty"), of_kind("event record", "event record"), "b")
    timed, _ = with_times(nodes, (), [launch(("a", 0, 1000), ("b", 2000, 1000))])
    assert times(timed) == [(0.0, 1.0), (None, None), (None, None), (2.0, 1.0)]


def test_a_launch_with_another_number_of_spans_is_ignored():
    nodes = nodes_of("a", "b")
    complete = launch(("a", 0, 1000), ("b", 1000, 1000))
    timed, timing = with_times(
        nodes, (), [launch(("a", 0, 5000)), complete, [*complete, *complete]]
    )
    assert timing.replays == 1
    assert times(timed) == [(0.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("launches", [[], [launch(("a", 0, 1))], [[]]])
def test_without_a_usable_launch_nodes_are_unchanged(launches):
    nodes = nodes_of("a", "b")
    assert with_times(nodes, (), launches) == (tuple(nodes), None)
    assert with_times([], (), [[]]) == ((), None)


def test_a_replay_ends_with_its_last_span():
    runs = launch(("a", 0, 9000), ("b", 100, 50))
    assert with_times(nodes_of("a", "b"), (), [runs])[1].p50_us == 9.0


replays = st.lists(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=3, max_size=3),
    min_size=1,
    max_size=9,
)


@given(replays)
@FUZZ
def test_the_times_of_a_graph_are_within_those_of_its_replays(drawn):
    runs = [launch(*(("a", s, d) for s, d in sorted(each))) for each in drawn]
    _, timing = with_times(nodes_of("a", "a", "a"), (), runs)
    measured = [(max(s.end for s in run) - run[0].start) / 1e3 for run in runs]
    assert min(measured) <= timing.p50_us <= timing.p95_us <= max(measured)


def test_percentiles_of_many_replays():
    runs = [launch(("a", 0, 1000 * i)) for i in range(1, 101)]
    timing = with_times(nodes_of("a"), (), runs)[1]
    assert 95.0 <= timing.p95_us < 97.0
    assert 50.0 <= timing.p50_us <= 51.0


def with_durations(*durations):
    nodes = nodes_of(*"abcdef"[: len(durations)])
    return [replace(node, duration_us=d) for node, d in zip(nodes, durations, strict=True)]


def test_the_critical_path_of_a_diamond_takes_the_longer_branch():
    diamond = edges((0, 1), (0, 2), (1, 3), (2, 3))
    assert critical_path(with_durations(1.0, 5.0, 2.0, 1.0), diamond) == (0, 1, 3)
    assert critical_path(with_durations(1.0, 2.0, 5.0, 1.0), diamond) == (0, 2, 3)


def test_the_critical_path_passes_unmeasured_nodes():
    assert critical_path(with_durations(1.0, None, 3.0, 9.0), edges((0, 1), (1, 2))) == (3,)
    assert critical_path(with_durations(8.0, None, 3.0, 9.0), edges((0, 1), (1, 2))) == (0, 1, 2)
    assert critical_path([], []) == ()


def test_an_edge_may_lead_to_an_earlier_index():
    assert critical_path(with_durations(1.0, 2.0, 4.0), edges((2, 0), (0, 1))) == (2, 0, 1)


CHILD = of_kind("child graph", "child graph")


def inside(parent, *nodes):
    return [replace(node, parent=parent) for node in nodes]


def test_the_critical_path_goes_through_contained_nodes():
    a, child, c, d, first, second = with_durations(1.0, None, 1.0, 3.0, 2.0, 3.0)
    nodes = [a, child, c, d, *inside(1, first, second)]
    fork = edges((0, 1), (1, 2), (0, 3), (4, 5))
    assert critical_path(nodes, fork) == (0, 1, 4, 5, 2)
    assert critical_path(nodes, fork[:-1]) == (0, 1, 5, 2), "the longer of two parallel nodes"
    assert critical_path([a, child, c, replace(d, duration_us=9.0), *nodes[4:]], fork) == (0, 3)
    unmeasured = [*nodes[:5], replace(second, parent=1, duration_us=None)]
    assert critical_path(unmeasured, edges((0, 1), (1, 2), (4, 5))) == (0, 1, 4, 5, 2)


def test_the_critical_path_goes_through_nested_child_graphs():
    a, outer, c, inner, last, deep = with_durations(1.0, None, 1.0, None, 2.0, 3.0)
    nodes = [a, outer, c, *inside(1, inner, last), *inside(3, deep)]
    assert critical_path(nodes, edges((0, 1), (1, 2), (3, 4))) == (0, 1, 3, 5, 4, 2)
    assert critical_path(nodes, edges((0, 1), (1, 2))) == (0, 1, 3, 5, 2)


def test_the_time_of_contained_nodes_counts():
    inner = replace(of_kind("kernel", "c", GRID), parent=1)
    nodes = nodes_of("a", CHILD, "b", inner)
    runs = launch(("a", 0, 1000), ("c", 1000, 5000), ("b", 6000, 2000))
    timed, timing = with_times(nodes, edges((0, 1), (1, 2)), [runs])
    assert (timing.critical_path, timing.critical_us) == ((0, 1, 3, 2), 8.0)
    assert [node.duration_us for node in timed] == [1.0, None, 2.0, 5.0]
    assert timing.bound_by == "order"


def test_kernels_of_a_child_graph_are_matched_in_its_place():
    """All kernels are equal here, so only the order distinguishes them."""
    inner = replace(of_kind("kernel", "a", GRID), parent=1)
    nodes = nodes_of("a", CHILD, "a", inner, inner)
    runs = launch(*(("a", 1000 * i, 100 * (i + 1)) for i in range(4)))
    timed, _ = with_times(nodes, edges((0, 1), (1, 2), (3, 4)), [runs])
    assert [node.duration_us for node in timed] == [0.1, None, 0.4, 0.2, 0.3]
