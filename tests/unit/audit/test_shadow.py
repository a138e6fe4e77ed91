"""The shadow watch tells graph bugs from padding bugs, names the node, and is in nobody's way."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import graphkit as gk
from graphkit.audit import Ledger
from graphkit.audit.shadow import ShadowWatch, audit_shadow
from graphkit.audit.shadow import watch as watching
from graphkit.audit.shadow.op_steps import written
from graphkit.graphs import RecorderBackend
from graphkit.reference.target import model_target
from graphkit.targets import RUNNERS

VERIFY, LAYERS = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.MULTI_LAYER_EAGLE
VOCAB, HIDDEN, WIDTH, SLOTS = 32, 8, 4, 40
GRAPH, PADDING, RESTLESS, FAILED = "graph bug", "padding bug", "restless step", "shadow failed"


class Tiny(nn.Module):
    """Calls ``mix(self, hidden, inputs)`` between its two layers; there bugs are planted."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))
        self.mix = mix
        self.scale, self.steps, self.place = 1.0, 0, 20
        self.requires_grad_(False)

    def forward(self, inputs):
        self.steps += 1
        hidden = self.embedding(inputs.input_ids) + inputs.positions[:, None] / 64
        hidden = self.mix(self, hidden, inputs)
        return gk.VerifyOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def as_it_is(model, hidden, inputs):
    return hidden


def scaled(model, hidden, inputs):
    return hidden * model.scale


def storing(model, hidden, inputs):
    """Keeps rows, and adds what is there to what is read."""
    before = model.cache[inputs.out_cache_loc]
    model.cache.index_copy_(0, inputs.out_cache_loc, hidden + before / 2)
    return hidden + before


def batch_of(requests, seed=0):
    random = np.random.default_rng([seed, requests])
    tokens = requests * WIDTH
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, requests + 1),
        seq_lens=np.full(requests, 5),
        input_ids=random.integers(0, VOCAB, tokens),
        positions=random.integers(0, 50, tokens),
        out_cache_loc=np.arange(1, tokens + 1),
    )


def target_of(model, **changes):
    facts = {
        "name": "tiny",
        "spec": gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH),
        "sizes": gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32),
        "forwards": {VERIFY: model},
        "sample_batch": lambda mode, batch_size, seed: batch_of(batch_size, seed),
        "weights": model,
        "state": {"cache": model.cache},
        "batch_sizes": [1, 4],
    }
    return gk.CaptureTarget(**{**facts, **changes})


@pytest.fixture
def capture():
    """``capture(mix)``: a captured runner, and its model."""
    made = []

    def make(mix=as_it_is, **changes):
        model = Tiny(mix)
        runner = target_of(model, **changes).runner(VERIFY, device="cpu")
        runner.capture()
        made.append(runner)
        return runner, model

    yield make
    for runner in made:
        runner.close()


def watched(runner, batches, **options):
    """What a watch that compares every replay finds."""
    options = {
        "every": 1,
        "weights": runner._parts.step.forward.__closure__[0].cell_contents,
    } | options
    with ShadowWatch(runner, **options) as watch:
        for batch in batches:
            runner.replay(batch)
    return watch


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("mode", RUNNERS, ids=lambda mode: mode.value)
def test_real_models_have_no_finding_in_any_mode(models, mode, topk):
    target = model_target(*models, name="tiny", topk=topk, max_batch_size=3)
    ledger = Ledger()
    with target.runner(mode, batch_sizes=[1, 3], device="cpu") as runner:
        runner.capture()
        audit_shadow(target, runner, ledger)
    assert ledger.findings == []
    assert [(check.batch_size, check.text) for check in ledger.checks] == [
        (1, "compared with the padded and the unpadded step: 1 live"),
        (3, "compared with the padded and the unpadded step: 1, 2, 3 live"),
    ]


def test_every_nth_replay_is_compared(capture):
    runner, model = capture()
    calls = deque()
    model.mix = lambda model, hidden, inputs: calls.append(inputs.batch_size) or hidden
    with ShadowWatch(runner, every=3) as watch:
        for turn in range(1, 8):
            runner.replay(batch_of(3, turn))
            assert watch.compared == turn // 3
    assert list(calls) == [4, 3, 4, 3]  # padded and bare, at the third and the sixth
    runner.replay(batch_of(3))
    assert watch.compared == 2


def test_staged_and_dispatched_batches_are_compared(capture):
    runner, model = capture(scaled)
    model.scale = 2.0
    with ShadowWatch(runner, every=1) as watch:
        batch = batch_of(3)
        staged = runner.stage(3)
        for name in ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc"):
            getattr(staged, name)[:] = getattr(batch, name)
        staged.replay()
        assert [finding.kind for finding in watch.findings] == [GRAPH]
        runner.run(batch_of(1))
    assert watch.compared == 2
    assert [finding.batch_size for finding in watch.findings] == [4, 1]


def test_nobody_notices_the_watch(capture):
    """Outputs, state, random numbers, counts and the host are as without it."""

    def mix(model, hidden, inputs):
        return storing(model, hidden, inputs) + torch.rand(len(hidden), 1)

    seen = []
    for options in ({"every": 100}, {"every": 1}):
        runner, model = capture(mix)
        torch.manual_seed(1)
        with ShadowWatch(runner, **options) as watch:
            outputs = [
                runner.replay(batch_of(live, live), clone=True).next_token_logits
                for live in (3, 1, 4, 2, 3, 3)
            ]
        assert watch.findings == []
        seen.append(
            (outputs, model.cache.clone(), torch.get_rng_state(), runner.stats, model.steps)
        )
    assert watch.compared == 6
    for one, other in zip(*(each[0] for each in seen), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[0][2], seen[1][2])
    assert seen[0][3:] == seen[1][3:]


def test_a_frozen_number_is_a_graph_bug(capture):
    runner, model = capture(scaled)
    model.scale = 0.5
    watch = watched(runner, [batch_of(3)], bisect=True)
    (finding,) = watch.findings
    assert (finding.audit, finding.kind, finding.mode, finding.batch_size) == (
        "shadow", GRAPH, "TARGET_VERIFY", 4,
    )  # fmt: skip
    assert (finding.field, finding.row, finding.request) == ("next_token_logits", 0, 0)
    assert finding.text.startswith(
        f"with 3 live requests row 0 of next_token_logits, of request 0, is {finding.after} from "
        f"the graph and {finding.before} without it. A capture made now differs first in node "
    )
    assert finding.text.endswith(
        f"{finding.node} (mul): its argument 1 other is 0.5, and 1.0 in the graph."
    )
    assert (finding.kernel, finding.module) == ("mul", "Tiny")
    assert "test_shadow.py" in finding.source
    assert finding.source.endswith("in scaled")


def test_the_caller_gets_it_whatever_a_bisection_leaves(capture, monkeypatch):
    runner, model = capture(scaled)
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    graph = runner._replayer.graphs[4]

    def scribbling(*_):
        graph.output["next_token_logits"].fill_(7)
        return watching.Divergence("nowhere.")

    monkeypatch.setattr(watching, "first_divergence", scribbling)
    model.scale = 0.5
    with ShadowWatch(runner, every=1, bisect=True) as watch:
        assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert watch.findings[0].text.endswith("nowhere.")


def test_the_caller_gets_what_the_graph_made(capture):
    runner, model = capture(scaled)
    right = runner.replay(batch_of(3), clone=True)
    model.scale = 0.5
    with ShadowWatch(runner, every=1, bisect=True) as watch:
        output = runner.replay(batch_of(3))
    assert watch.findings
    assert torch.equal(output.next_token_logits, right.next_token_logits)
    assert torch.equal(output.hidden_states, right.hidden_states)


def test_a_weight_that_was_replaced_is_a_graph_bug(capture):
    runner, model = capture()
    model.head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN), requires_grad=False)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert finding.text.endswith(
        f"node {finding.node} (addmm): its argument 2 mat2 is float32 [8, 32] at head.weight, and "
        "float32 [8, 32] at external memory in the graph."
    )
    assert (finding.kernel, finding.module) == ("addmm", "head")


def test_undeclared_memory_that_was_replaced_is_a_graph_bug(capture):
    table = {"bias": torch.randn(HIDDEN)}
    runner, _ = capture(lambda model, hidden, inputs: hidden + table["bias"])
    table["bias"] = torch.randn(HIDDEN)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert f"first in node {finding.node} (add): its argument 1 other is constant #" in finding.text
    assert finding.source.endswith("in <lambda>")


def test_a_node_that_is_given_the_same_is_found_by_what_it_makes(capture):
    """Nothing tells tensors in a list from others of their shape."""
    table = {"order": torch.arange(HIDDEN)}
    runner, _ = capture(lambda model, hidden, inputs: hidden[:, table["order"]])
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert f"Given the same, node {finding.node} (index) is the first to make something else" in (
        finding.text
    )


@pytest.mark.parametrize("first", ["index", "mul"])
def test_what_comes_first_is_named(capture, first):
    """Of two bugs, one told by what a node is given and one by what it makes."""
    table = {"order": torch.arange(HIDDEN)}

    def mix(model, hidden, inputs):
        if first == "index":
            return hidden[:, table["order"]] * model.scale
        return (hidden * model.scale)[:, table["order"]]

    runner, model = capture(mix)
    table["order"], model.scale = torch.arange(HIDDEN).flip(0), 0.5
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == first


@torch.library.custom_op("shadow_test::turn", mutates_args=())
def turn(rows: torch.Tensor) -> torch.Tensor:
    """Another number at each call."""
    return torch.full_like(rows, next(_turns))


_turns = itertools.count()


def test_results_that_are_never_the_same_are_passed_over(capture):
    table = {"order": torch.arange(HIDDEN)}

    def mix(model, hidden, inputs):
        turn(hidden)
        return hidden[:, table["order"]]

    runner, _ = capture(mix)
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"


def test_results_that_nobody_has_set_are_not_looked_at():
    graph = RecorderBackend().capture(lambda: torch.empty(5) + torch.zeros(5))
    assert [len(list(written(op))) for op in graph.ops] == [0, 1, 1]


def test_every_run_of_a_bisection_begins_with_the_same_state(capture):
    table = {"order": torch.arange(HIDDEN)}
    runner, _ = capture(
        lambda model, hidden, inputs: storing(model, hidden, inputs)[:, table["order"]]
    )
    table["order"] = torch.arange(HIDDEN).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index"
    assert finding.source.endswith("in <lambda>")


def test_what_writes_in_place_is_looked_at(capture):
    table = {"order": torch.arange(4)}

    def mix(model, hidden, inputs):
        made = torch.zeros(4, HIDDEN)
        made[table["order"]] = hidden[:4]  # a tensor in a list, and nothing but a write in place
        return hidden + made[0]

    runner, _ = capture(mix)
    table["order"] = torch.arange(4).flip(0)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kernel == "index_put_"


def test_a_graph_that_lacks_a_node(capture):
    def mix(model, hidden, inputs):
        return hidden * 2 if model.steps < 0 else hidden

    runner, model = capture(mix)
    model.steps = -100
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.endswith("another node 4: mul for addmm.")


def test_a_graph_that_lacks_the_last_node(capture):
    class Longer(Tiny):
        def forward(self, inputs):
            output = super().forward(inputs)
            if self.scale != 1:
                output.next_token_logits = output.next_token_logits * 2
            return output

    model = Longer(as_it_is)
    runner = target_of(model).runner(VERIFY, device="cpu")
    runner.capture()
    nodes = runner._replayer.graphs[4].num_nodes
    model.scale = 2.0
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.endswith(
        f"A capture made now has {nodes + 1} nodes, and the graph has {nodes}."
    )
    assert finding.kernel == "mul"


def test_a_step_that_is_another_one_when_it_is_captured(capture):
    def mix(model, hidden, inputs):
        return hidden if _get_current_dispatch_mode() is None else hidden * 2

    runner, _ = capture(mix)
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert finding.text.endswith("the step itself does something else when it is captured.")
    assert finding.node is None


def test_a_bisection_that_fails_still_tells_the_bug(capture):
    def mix(model, hidden, inputs):
        if model.scale != 1 and _get_current_dispatch_mode() is not None:
            hidden.sum().item()
        return hidden * model.scale

    runner, model = capture(mix)
    model.scale = 0.5
    (finding,) = watched(runner, [batch_of(3), batch_of(3)], bisect=True).findings
    assert finding.kind == GRAPH
    assert "without it. A capture now fails: CaptureError: cannot capture" in finding.text


def test_without_bisection_no_node_is_named(capture):
    runner, model = capture(scaled)
    model.scale = 0.5
    (finding,) = watched(runner, [batch_of(3)]).findings
    assert finding.text.endswith("without it.")
    assert finding.node is None


def test_a_leak_is_a_padding_bug(capture):
    runner, _ = capture(lambda model, hidden, inputs: hidden + hidden.mean(0))
    watch = watched(runner, [batch_of(4), batch_of(3), batch_of(3, 1)])
    (finding,) = watch.findings  # of a size and a field one
    assert (finding.kind, finding.batch_size, finding.row) == (PADDING, 4, 0)
    assert finding.text == (
        f"with 3 live requests row 0 of next_token_logits, of request 0, is {finding.after} with "
        f"pads and {finding.before} without."
    )
    assert "pads" in finding.advice


def test_near_ties_are_no_padding_bug():
    """A token that is likelier by one rounding, another one at every batch size."""

    def tied(inputs):
        logits = torch.zeros(inputs.num_tokens, VOCAB)
        logits[:, inputs.batch_size :: 7] += torch.finfo(torch.float32).eps
        return gk.VerifyOutput(next_token_logits=logits, hidden_states=logits[:, :HIDDEN].clone())

    with gk.DraftRunner(
        tied, spec=gk.SpecConfig("EAGLE", 3, 1, 4), batch_sizes=[4], device="cpu",
        sizes=gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32),
    ) as runner:  # fmt: skip
        runner.capture()
        with ShadowWatch(runner, every=1) as watch:
            for live in (1, 2, 3):
                runner.replay(
                    gk.DraftInputs(
                        req_pool_indices=np.arange(1, live + 1),
                        seq_lens=np.full(live, 5),
                        topk_p=np.full((live, 1), 0.5, dtype=np.float32),
                        topk_index=np.full((live, 1), 3),
                        hidden_states=torch.zeros(live, HIDDEN),
                        positions=np.full(live, 5),
                        out_cache_loc=np.arange(1, live * 3 + 1),
                    )
                )
    assert (watch.findings, watch.compared) == ([], 3)


def test_both_bugs_are_told_apart(capture):
    runner, model = capture(lambda model, hidden, inputs: (hidden + hidden.mean(0)) * model.scale)
    model.scale = 3.0
    watch = watched(runner, [batch_of(3)])
    assert sorted(finding.kind for finding in watch.findings) == [GRAPH, PADDING]


def test_state_that_the_graph_leaves_otherwise(capture):
    """A write to a frozen place; the output is right."""

    def mix(model, hidden, inputs):
        model.cache.narrow(0, model.place, 4).copy_(hidden[:4])
        return hidden

    runner, model = capture(mix)
    model.place = 21
    watch = watched(runner, [batch_of(1)], bisect=True)
    (finding,) = watch.findings
    assert (finding.kind, finding.field) == (GRAPH, "cache")
    assert finding.text.startswith(
        "with 1 live request the graph leaves other values in cache than the same step without it."
    )
    assert finding.text.endswith(
        f"node {finding.node} (copy_): its argument 0 self is float32 [4, 8] at cache+0x2a0, and "
        "float32 [4, 8] at cache+0x280 in the graph."
    )


def test_the_dummy_slot_may_hold_anything(capture):
    def mix(model, hidden, inputs):
        model.cache[0].fill_(model.place)
        return hidden

    runner, model = capture(mix)
    model.place = 21
    assert watched(runner, [batch_of(1)]).findings == []


def test_state_that_is_never_the_same_is_not_the_graphs(capture):
    turns = itertools.count()

    def mix(model, hidden, inputs):
        model.cache[5].fill_(next(turns))
        return hidden

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(1)]).findings == []


def test_a_step_that_counts_on_the_host_is_compared_from_the_same_count(capture):
    def mix(model, hidden, inputs):
        model.cache[0].fill_(model.steps)
        return hidden * (2 if model.steps == 7 else 1)

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(3)]).findings[0].kind == GRAPH  # and not restless


def test_a_step_that_never_does_the_same(capture):
    turns = itertools.count()
    runner, _ = capture(lambda model, hidden, inputs: hidden + next(turns))
    (finding, *_) = watched(runner, [batch_of(4)]).findings
    assert finding.kind == RESTLESS
    assert finding.text.startswith("with 4 live requests row 0 of next_token_logits, of request 0")


def rounding(turns):
    """Adds what a sum in changing order may add."""
    return lambda model, hidden, inputs: hidden * model.scale + 1e-7 * next(turns)


def test_a_step_that_rounds_otherwise_every_time_is_restless(capture):
    runner, _ = capture(rounding(itertools.cycle([0, 1, 2])))
    assert {finding.kind for finding in watched(runner, [batch_of(4)]).findings} == {RESTLESS}


def test_a_graph_that_is_further_off_than_a_restless_step_is_wrong(capture):
    runner, model = capture(rounding(itertools.cycle([0, 1, 2])))
    model.scale = 2.0
    assert GRAPH in {finding.kind for finding in watched(runner, [batch_of(4)]).findings}


def test_a_way_that_fails_is_nobodys_trouble(capture):
    runner, model = capture()
    right = runner.replay(batch_of(3), clone=True).next_token_logits

    def failing(model, hidden, inputs):
        raise ValueError("not today")

    model.mix = failing
    with ShadowWatch(runner, every=1) as watch:
        for _ in range(6):
            assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    (finding,) = watch.findings
    assert (finding.kind, finding.severity) == (FAILED, "warning")
    assert finding.text.endswith("could not be compared: ValueError: not today")
    assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)


def test_a_way_that_fails_before_it_reads_its_batch(capture, monkeypatch):
    runner, _ = capture()
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    with ShadowWatch(runner, every=1) as watch:
        monkeypatch.setattr(type(runner._parts), "stages", lambda self, size: 1 / 0)
        for _ in range(6):
            assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert [finding.kind for finding in watch.findings] == [FAILED]


def test_a_launch_that_fails_leaves_the_runner_usable(capture):
    runner, _ = capture()
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    fit = runner._replayer._fits[3, None]
    launch = fit.launch
    with ShadowWatch(runner, every=1) as watch:
        for turn in range(6):
            fit.launch = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                runner.replay(batch_of(3, 1 + turn))
            fit.launch = launch
            assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert (watch.findings, watch.compared) == ([], 6)


def test_the_batch_is_what_the_graph_was_given(capture):
    """Also if the step writes to its inputs."""

    def mix(model, hidden, inputs):
        inputs.positions.add_(7)
        return hidden + inputs.positions[:, None]

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(3), batch_of(4)]).findings == []


def test_watches_may_be_nested(capture):
    runner, _ = capture(scaled)
    with ShadowWatch(runner, every=1) as outer:
        with ShadowWatch(runner, every=1) as inner:
            runner.replay(batch_of(2))
        runner.replay(batch_of(2))
    runner.replay(batch_of(2))
    assert (outer.compared, inner.compared) == (2, 1)
    assert outer.findings == inner.findings == []


def test_replays_that_run_without_the_graph_are_not_compared(capture):
    runner, model = capture(scaled)
    model.scale = 0.5
    runner.shadow = "padded"
    watch = watched(runner, [batch_of(3)])
    assert (watch.compared, watch.findings) == (0, [])


def test_misuse_is_refused(capture):
    runner, _ = capture()
    with pytest.raises(gk.ConfigError, match=r"ShadowWatch\.every must be an int >= 1, got 0"):
        ShadowWatch(runner, every=0)
    planned = target_of(Tiny(as_it_is)).runner(VERIFY, device="cpu")
    with pytest.raises(gk.ReplayError, match="runner is planned: a shadow watch needs captured"):
        ShadowWatch(planned).__enter__()


def test_the_audit_tells_by_size_and_leaves_state_alone():
    model = Tiny(lambda model, hidden, inputs: storing(model, hidden, inputs) * model.scale)
    target, ledger = target_of(model), Ledger()
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        model.scale = 2.0
        audit_shadow(target, runner, ledger)
    assert [(f.kind, f.batch_size, f.kernel) for f in ledger.findings] == [
        (GRAPH, 1, "mul"), (GRAPH, 4, "mul"),
    ]  # fmt: skip
    assert [check.findings for check in ledger.checks] == [1, 1]
    assert not model.cache.any()


def test_a_chain_of_graphs_is_bisected_as_one(models):
    target = model_target(*models, name="tiny", max_batch_size=2)
    head, calls = target.forwards[LAYERS][1], {"scale": 1.0}

    def scaled_layer(inputs):
        output = head(inputs)
        output.next_token_logits = output.next_token_logits * calls["scale"]
        return output

    forwards = [target.forwards[LAYERS][0], scaled_layer, target.forwards[LAYERS][2]]
    with gk.MultiLayerEagleRunner(
        forwards, spec=target.spec, sizes=target.sizes, batch_sizes=[2], device="cpu",
        attention=target.attention[LAYERS], one_graph=False, state=target.state,
    ) as runner:  # fmt: skip
        runner.capture()
        calls["scale"] = 0.5
        with ShadowWatch(runner, every=1, weights=target.weights, bisect=True) as watch:
            runner.replay(target.batch(LAYERS, 2, 1))
    (finding,) = watch.findings
    assert finding.text.endswith("(mul): its argument 1 other is 0.5, and 1.0 in the graph.")
    assert finding.source.endswith("in scaled_layer")
