"""A whole step is shown by phase, and its loops by their composition."""

from __future__ import annotations

import dataclasses

import pytest

from graphkit.records import LoopBody, LoopRecord, Mismatch, SizeRecord
from graphkit.views import capture_view, inspect_view
from graphkit.views.module_tree import module_tree, node_phases

SCOPES = (
    ("(refresh)", "", 1.0), ("", "", 0.5),
    ("draft.layers.0", "draft", 4.0), ("(forward)", "draft/build", 0.25),
    ("(forward)", "build", 0.25),
    ("target.layers.0", "verify", 8.0), ("target.layers.1", "verify/mine/draft", 8.0),
    ("(forward)", "accept", 1.0), ("draft.layers.0", "extend", 2.0),
)  # fmt: skip
LOOPS = (
    LoopRecord(
        kind="greedy",
        prologue_nodes=2,
        bodies=(LoopBody(batch_size=2, num_nodes=347), LoopBody(batch_size=8, num_nodes=1350)),
        steps_compared=6,
    ),
    LoopRecord(
        kind="sampled",
        prologue_nodes=1,
        bodies=(LoopBody(batch_size=8, num_nodes=1),),
        steps_compared=6,
    ),
)


@pytest.fixture
def graph_of(make_graph):
    """``graph_of(mode)``: a graph of that mode with the scopes of a step."""

    def make(mode):
        nodes = [
            {
                "kind": "kernel", "name": "k", "short_name": f"k{i}", "module": module,
                "scope": scope, "duration_us": us,
            }
            for i, (module, scope, us) in enumerate(SCOPES)
        ]  # fmt: skip
        return make_graph(mode, 8, measured=False, places=lambda _: nodes)

    return make


@pytest.fixture
def of_step(capture, graph_of):
    """A capture of STEP alone, of sizes 2 and 8."""
    sizes = tuple(
        SizeRecord(
            batch_size=size, num_tokens=size, num_nodes=9, capture_ms=1.0, pool_bytes=0,
            replay_us=2.0, eager_us=4.0, largest_difference=0.0, batches_compared=size,
        )
        for size in (2, 8)
    )  # fmt: skip
    mode = dataclasses.replace(
        capture.modes[0], mode="STEP", sizes=sizes, loops=LOOPS, stats=None, buffers=()
    )
    return dataclasses.replace(capture, modes=(mode,), mismatches=(), graphs=(graph_of("STEP"),))


def test_nodes_are_grouped_by_their_outermost_phase(graph_of):
    graph = graph_of("STEP")
    tree = module_tree(graph)
    found = {child.name: (len(child.all_nodes), child.duration_us) for child in tree.children}
    assert found == {
        "(refresh)": (1, 1.0), "draft": (1, 4.0), "build": (2, 0.5), "verify": (2, 16.0),
        "accept": (1, 1.0), "extend": (1, 2.0),
    }  # fmt: skip
    assert [node.short_name for node in tree.nodes] == ["k1"]
    assert tree.all_nodes == graph.nodes
    paths = {child.path: [each.path for each in child.children] for child in tree.children}
    assert paths["draft"] == ["draft.draft"]
    assert paths["extend"] == ["extend.draft"]


def test_nodes_of_a_child_graph_are_in_the_phase_of_their_node(graph_of):
    graph = graph_of("STEP")
    inside = dataclasses.replace(graph.nodes[0], index=len(graph.nodes), parent=5)
    graph = dataclasses.replace(graph, nodes=(*graph.nodes, inside))
    assert node_phases(graph)[-1] == "verify"


def test_graphs_of_other_modes_have_no_phases(graph_of):
    graph = graph_of("DRAFT")
    assert set(node_phases(graph)) == {""}
    paths = {child.path for child in module_tree(graph).children}
    assert paths == {"(refresh)", "(forward)", "draft", "target"}


def test_a_step_reads_as_stored(of_step, text, golden):
    golden("step.txt", text(inspect_view(of_step), 100))


def test_the_verdict_says_what_was_compared(of_step, text):
    alone = " ".join(text(capture_view(of_step), 100).split())
    assert "WHILE again" in alone
    verdict = (
        "STEP: 10 live batches replayed: each equals the padded step without a graph bit by bit, "
        "in its report and in the state of the requests"
    )
    assert f"{verdict}; 6 steps in one launch, as in single replays." in alone
    assert "eager within rounding" not in alone
    (mode,) = of_step.modes
    draft = dataclasses.replace(mode, mode="DRAFT", loops=())
    right = dataclasses.replace(of_step, modes=(draft, mode))
    both = " ".join(text(capture_view(right), 100).split())
    assert "10 live batches replayed: each equals the padded path without a graph bit by" in both
    assert verdict in both
    loops = tuple(dataclasses.replace(loop, steps_compared=0) for loop in LOOPS)
    unrepeatable = dataclasses.replace(mode, loops=loops)
    unstable = text(capture_view(dataclasses.replace(of_step, modes=(unrepeatable,))), 300)
    assert "Launches were not compared: the step is not repeatable." in unstable


def test_a_loop_that_differs_is_a_sentence(of_step, text):
    wrong = Mismatch(
        field="report of step 3", row=1, request=1, expected=5.0, got=6.0, mode="STEP",
        batch_size=8, padded_batch_size=8, kind="a launch differs",
    )  # fmt: skip
    shown = text(capture_view(dataclasses.replace(of_step, mismatches=(wrong,))), 200)
    assert "1 of 10 replays is wrong:" in shown
    assert (
        "STEP, 8 requests at size 8: a launch differs: report of step 3 row 1 (request 1) is 6 "
        "instead of 5" in shown
    )
