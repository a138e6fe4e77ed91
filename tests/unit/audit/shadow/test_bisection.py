"""Bisection names the first node of a wrong graph that differs from a new capture."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import graphkit as gk
from graphkit.audit import ShadowWatch
from graphkit.audit.shadow.first_results import is_beyond_rounding, written_tensors
from graphkit.graphs import RecorderBackend
from small_targets import llama_target

VERIFY = gk.ForwardMode.TARGET_VERIFY
LAYERS = gk.ForwardMode.MULTI_LAYER_EAGLE
VOCAB = 32
HIDDEN = 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRAPH = "graph bug"


@pytest.fixture
def finding_of(capture, batch_of, watched):
    """Return ``finding_of(mix, count)``: the finding where a table of ``count`` changes after it.

    ``mix`` has the table of an order of rows as its last argument.
    """

    def find(mix, count=HIDDEN):
        table = {"order": torch.arange(count)}
        runner, model = capture(lambda *args: mix(*args, table["order"]))
        table["order"] = torch.arange(count).flip(0)
        model.scale = 0.5
        (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
        return finding

    return find


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
    assert " ulp of float32). A new capture differs first in argument 1 of `mul` " in finding.text
    assert finding.text.endswith(f"(node {finding.node}): it is 0.5; in the graph it is 1.0.")
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
        f"argument 2 of `addmm` (node {finding.node}): it is float32 [8, 32] at head.weight; in "
        "the graph it is float32 [8, 32] at external memory."
    )
    assert (finding.kernel, finding.module) == ("addmm", "head")


@pytest.mark.usefixtures("unseen_numbers")
def test_undeclared_memory_that_was_replaced_is_a_graph_bug(capture, batch_of, watched):
    table = {"bias": torch.randn(HIDDEN)}
    runner, _ = capture(lambda model, hidden, inputs: hidden + table["bias"])
    table["bias"] = torch.randn(HIDDEN)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert f"first in argument 1 of `add` (node {finding.node}): it is constant #" in finding.text
    assert finding.source.endswith("in <lambda>")


@pytest.mark.usefixtures("unseen_numbers")
def test_a_node_with_equal_arguments_is_found_by_its_results(finding_of):
    """Tensors in a list are compared by dtype and shape only."""
    finding = finding_of(lambda model, hidden, inputs, order: hidden[:, order])
    assert finding.kind == GRAPH
    text = f"Node {finding.node} (index) is the first with different results in a new capture"
    assert text in finding.text


@pytest.mark.usefixtures("unseen_numbers")
@pytest.mark.parametrize("first", ["index", "mul"])
def test_the_earlier_of_two_nodes_is_named(finding_of, first):
    """One node differs in its arguments, the other one in its results."""

    def mix(model, hidden, inputs, order):
        if first == "index":
            return hidden[:, order] * model.scale
        return (hidden * model.scale)[:, order]

    assert finding_of(mix).kernel == first


@pytest.mark.usefixtures("unseen_numbers")
def test_a_graph_that_lacks_a_node(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        return hidden * 2 if model.steps < 0 else hidden

    runner, model = capture(mix)
    model.steps = -100
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.endswith("kernel of node 4: it is mul.Tensor; in the graph it is addmm.")


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
    assert finding.text.endswith(f"number of nodes: it is {nodes + 1}; in the graph it is {nodes}.")
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
def test_a_chain_of_layers_is_bisected_as_one(capture):
    target = llama_target(max_batch_size=2)
    head, calls = target.forwards[LAYERS][1], {"scale": 1.0}

    def scaled_layer(inputs):
        output = head(inputs)
        output.next_token_logits = output.next_token_logits * calls["scale"]
        return output

    forwards = [target.forwards[LAYERS][0], scaled_layer, target.forwards[LAYERS][2]]
    with gk.MultiLayerEagleRunner(
        forwards, spec=target.spec, sizes=target.sizes, batch_sizes=[2], device="cpu",
        attention=target.attention[LAYERS], mutable_state=target.mutable_state,
    ) as runner:  # fmt: skip
        runner.capture()
        calls["scale"] = 0.5
        with ShadowWatch(runner, every=1, weights=target.weights, bisect=True) as watch:
            runner.replay(target.batch(LAYERS, 2, 1))
    (finding,) = watch.findings
    assert finding.text.endswith(f"(node {finding.node}): it is 0.5; in the graph it is 1.0.")
    assert finding.source.endswith("in scaled_layer")


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def numbers(dtype, count=4096):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sums_in_another_order_are_within_rounding(dtype):
    terms = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    one, other = (each.sum(0).to(dtype) for each in (terms, terms.flip(0)))
    assert not torch.equal(one, other)
    assert not is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.1, 2.0, -1.0, 0.0])
def test_wrong_numbers_are_beyond_rounding(dtype, factor):
    one = numbers(dtype)
    other = one.clone()
    other[100:104] *= factor
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_or_infinity_on_one_side_is_beyond_rounding(dtype, value):
    one = numbers(dtype)
    other = one.clone()
    other[9] = value
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)
    assert is_beyond_rounding(as_bytes(other), as_bytes(one), dtype)
    assert not is_beyond_rounding(as_bytes(other), as_bytes(other), dtype)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_integers_must_be_equal(kind):
    one = torch.full((1024,), 8191).to(kind)
    other = one.clone()
    other[0] = 0 if kind is torch.bool else 8190
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), torch.float32)


@torch.library.custom_op("shadow_test::turn", mutates_args=())
def turn(rows: torch.Tensor) -> torch.Tensor:
    """Return a different number at each call."""
    return torch.full_like(rows, next(_turns))


_turns = itertools.count()


def test_nondeterministic_results_are_ignored(finding_of):
    def mix(model, hidden, inputs, order):
        turn(hidden)
        return hidden[:, order]

    assert finding_of(mix).kernel == "index"


def test_uninitialised_results_are_ignored(capture):
    graph = RecorderBackend().capture(lambda: torch.empty(5) + torch.zeros(5))
    assert [len(list(written_tensors(op))) for op in graph.ops] == [0, 1, 1]


@pytest.mark.usefixtures("unseen_numbers")
def test_every_run_of_a_bisection_starts_from_the_same_state(finding_of, storing):
    finding = finding_of(lambda *args: storing(*args[:3])[:, args[3]])
    assert finding.kernel == "index"
    assert finding.source.endswith("in <lambda>")


@pytest.mark.usefixtures("unseen_numbers")
def test_writes_in_place_are_compared(finding_of):
    def mix(model, hidden, inputs, order):
        made = torch.zeros(4, HIDDEN)
        made[order] = hidden[:4]  # a tensor in a list, and only a write in place
        return hidden + made[0]

    assert finding_of(mix, 4).kernel == "index_put_"
