"""Bisection names the first node of a wrong graph that differs from a new capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import graphkit as gk
from graphkit.audit import ShadowWatch
from small_targets import llama_target

VERIFY = gk.ForwardMode.TARGET_VERIFY
LAYERS = gk.ForwardMode.MULTI_LAYER_EAGLE
VOCAB = 32
HIDDEN = 8
GRAPH = "graph bug"


@pytest.mark.usefixtures("unseen_numbers")
def test_a_frozen_number_is_a_graph_bug(capture, batch_of, watched, scaled):
    runner, model = capture(scaled)
    model.scale = 0.5
    watch = watched(runner, [batch_of(3)], bisect=True)
    (finding,) = watch.findings
    assert (finding.audit, finding.kind, finding.mode, finding.batch_size) == (
        "shadow", GRAPH, "TARGET_VERIFY", 4,
    )  # fmt: skip
    assert (finding.field, finding.row, finding.request) == ("next_token_logits", 0, 0)
    assert finding.text.startswith(
        f"row 0 of next_token_logits (request 0 of 3) is {finding.after} from the graph and "
        f"{finding.before} without it ("
    )
    assert " ulp of float32). A new capture differs first in node " in finding.text
    assert finding.text.endswith(
        f"{finding.node} (mul): argument 1 other is 0.5; in the graph it is 1.0."
    )
    assert (finding.kernel, finding.module) == ("mul", "Tiny")
    assert "conftest.py" in finding.source
    assert finding.source.endswith("in scaled")


def test_without_bisection_no_node_is_named(capture, batch_of, watched, scaled):
    runner, model = capture(scaled)
    model.scale = 0.5
    (finding,) = watched(runner, [batch_of(3)]).findings
    assert finding.text.endswith(" ulp of float32).")
    assert finding.node is None


@pytest.mark.usefixtures("unseen_numbers")
def test_a_weight_that_was_replaced_is_a_graph_bug(capture, batch_of, watched):
    runner, model = capture()
    model.head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN), requires_grad=False)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert finding.text.endswith(
        f"node {finding.node} (addmm): argument 2 mat2 is float32 [8, 32] at head.weight; in the "
        "graph it is float32 [8, 32] at external memory."
    )
    assert (finding.kernel, finding.module) == ("addmm", "head")


@pytest.mark.usefixtures("unseen_numbers")
def test_undeclared_memory_that_was_replaced_is_a_graph_bug(capture, batch_of, watched):
    table = {"bias": torch.randn(HIDDEN)}
    runner, _ = capture(lambda model, hidden, inputs: hidden + table["bias"])
    table["bias"] = torch.randn(HIDDEN)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert f"first in node {finding.node} (add): argument 1 other is constant #" in finding.text
    assert finding.source.endswith("in <lambda>")


@pytest.mark.usefixtures("unseen_numbers")
def test_a_node_with_equal_arguments_is_found_by_its_results(capture, batch_of, watched):
    """Tensors in a list are compared by dtype and shape only."""
    table = {"order": torch.arange(HIDDEN)}
    runner, _ = capture(lambda model, hidden, inputs: hidden[:, table["order"]])
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    text = f"Node {finding.node} (index) is the first with different results in a new capture"
    assert text in finding.text


@pytest.mark.usefixtures("unseen_numbers")
@pytest.mark.parametrize("first", ["index", "mul"])
def test_the_earlier_of_two_nodes_is_named(capture, first, batch_of, watched):
    """One node differs in its arguments, the other one in its results."""
    table = {"order": torch.arange(HIDDEN)}

    def mix(model, hidden, inputs):
        if first == "index":
            return hidden[:, table["order"]] * model.scale
        return (hidden * model.scale)[:, table["order"]]

    runner, model = capture(mix)
    table["order"], model.scale = torch.arange(HIDDEN).flip(0), 0.5
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == first


@pytest.mark.usefixtures("unseen_numbers")
def test_a_graph_that_lacks_a_node(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        return hidden * 2 if model.steps < 0 else hidden

    runner, model = capture(mix)
    model.steps = -100
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.endswith("Node 4 of a new capture is mul; in the graph it is addmm.")


@pytest.mark.usefixtures("unseen_numbers")
def test_a_graph_that_lacks_the_last_node(capture, batch_of, target_of, watched, tiny):
    class Longer(tiny):
        def forward(self, inputs):
            output = super().forward(inputs)
            if self.scale != 1:
                output.next_token_logits = output.next_token_logits * 2
            return output

    model = Longer()
    runner = target_of(model).runner(VERIFY, device="cpu")
    runner.capture()
    nodes = runner.graphs[4].num_nodes
    model.scale = 2.0
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.endswith(f"A new capture has {nodes + 1} nodes; the graph has {nodes}.")
    assert finding.kernel == "mul"


def test_a_step_that_behaves_differently_while_it_is_captured(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        return hidden if _get_current_dispatch_mode() is None else hidden * 2

    runner, _ = capture(mix)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert finding.text.endswith("the step itself behaves differently while it is captured.")
    assert finding.node is None


def test_a_bisection_that_fails_still_reports_the_bug(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        if model.scale != 1 and _get_current_dispatch_mode() is not None:
            hidden.sum().item()
        return hidden * model.scale

    runner, model = capture(mix)
    model.scale = 0.5
    (finding,) = watched(runner, [batch_of(3), batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert "ulp of float32). A new capture fails: CaptureError: cannot capture" in finding.text


@pytest.mark.usefixtures("unseen_numbers")
def test_a_chain_of_graphs_is_bisected_as_one(capture):
    target = llama_target(max_batch_size=2)
    head, calls = target.forwards[LAYERS][1], {"scale": 1.0}

    def scaled_layer(inputs):
        output = head(inputs)
        output.next_token_logits = output.next_token_logits * calls["scale"]
        return output

    forwards = [target.forwards[LAYERS][0], scaled_layer, target.forwards[LAYERS][2]]
    with gk.MultiLayerEagleRunner(
        forwards, spec=target.spec, sizes=target.sizes, batch_sizes=[2], device="cpu",
        attention=target.attention[LAYERS], one_graph=False, mutable_state=target.mutable_state,
    ) as runner:  # fmt: skip
        runner.capture()
        calls["scale"] = 0.5
        with ShadowWatch(runner, every=1, weights=target.weights, bisect=True) as watch:
            runner.replay(target.batch(LAYERS, 2, 1))
    (finding,) = watch.findings
    assert finding.text.endswith("(mul): argument 1 other is 0.5; in the graph it is 1.0.")
    assert finding.source.endswith("in scaled_layer")
