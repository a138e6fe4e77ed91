"""The shadow watch compares every n-th replay, and does not affect callers."""

from __future__ import annotations

from collections import deque

import pytest
import torch

import graphkit as gk
from graphkit.audit import AuditLog, ShadowWatch
from graphkit.audit.shadow import watch as watch_module
from graphkit.audit.shadow.watch import audit_shadow

VERIFY = gk.ForwardMode.TARGET_VERIFY
GRAPH = "graph bug"
FAILED = "shadow failed"


def test_every_nth_replay_is_compared(capture, batch_of):
    runner, model = capture()
    calls = deque()
    model.mix = lambda model, hidden, inputs: calls.append(inputs.batch_size) or hidden
    with ShadowWatch(runner, every=3) as watch:
        for turn in range(1, 8):
            runner.replay(batch_of(3, turn))
            assert watch.compared == turn // 3
    assert list(calls) == [4, 3, 4, 3]  # padded and unpadded, at the third and the sixth
    runner.replay(batch_of(3))
    assert watch.compared == 2


def test_staged_and_dispatched_batches_are_compared(capture, batch_of, scaled):
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


def test_the_watch_has_no_side_effects(capture, batch_of, storing):
    """Outputs, state, random numbers, counts and host objects are as without it."""

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


def test_the_caller_gets_the_output_of_the_graph(capture, batch_of, scaled):
    runner, model = capture(scaled)
    right = runner.replay(batch_of(3), clone=True)
    model.scale = 0.5
    with ShadowWatch(runner, every=1, bisect=True) as watch:
        output = runner.replay(batch_of(3))
    assert watch.findings
    assert torch.equal(output.next_token_logits, right.next_token_logits)
    assert torch.equal(output.hidden_states, right.hidden_states)


@pytest.mark.usefixtures("unseen_numbers")
def test_the_caller_gets_it_also_after_a_bisection(capture, monkeypatch, batch_of, scaled):
    runner, model = capture(scaled)
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    graph = runner.graphs[4]

    def overwriting(*_):
        graph.output["next_token_logits"].fill_(7)
        return "nowhere.", None

    monkeypatch.setattr(watch_module, "first_divergence", overwriting)
    model.scale = 0.5
    with ShadowWatch(runner, every=1, bisect=True) as watch:
        assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert watch.findings[0].text.endswith("nowhere.")


def test_a_comparison_that_fails_does_not_affect_the_caller(capture, batch_of):
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
    assert finding.text.endswith("of a replay of 3 live requests failed: ValueError: not today")
    assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)


def test_a_padded_run_that_fails_before_it_reads_its_batch(capture, monkeypatch, batch_of):
    runner, _ = capture()
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    with ShadowWatch(runner, every=1) as watch:
        monkeypatch.setattr(type(runner.step), "graph_function", lambda self, size: 1 / 0)
        for _ in range(6):
            assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert [finding.kind for finding in watch.findings] == [FAILED]


def test_a_launch_that_fails_leaves_the_runner_usable(capture, batch_of):
    runner, _ = capture()
    right = runner.replay(batch_of(3), clone=True).next_token_logits
    plan = runner._replayer.make_plan(3, None)
    launch = plan.launch
    with ShadowWatch(runner, every=1) as watch:
        for turn in range(6):
            plan.launch = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                runner.replay(batch_of(3, 1 + turn))
            plan.launch = launch
            assert torch.equal(runner.replay(batch_of(3)).next_token_logits, right)
    assert (watch.findings, watch.compared) == ([], 6)


def test_the_batch_is_that_of_the_graph(capture, batch_of, watched):
    """The step may write to its inputs."""

    def mix(model, hidden, inputs):
        inputs.positions.add_(7)
        return hidden + inputs.positions[:, None]

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(3), batch_of(4)]).findings == []


def test_watches_may_be_nested(capture, batch_of, scaled):
    runner, _ = capture(scaled)
    with ShadowWatch(runner, every=1) as outer:
        with ShadowWatch(runner, every=1) as inner:
            runner.replay(batch_of(2))
        runner.replay(batch_of(2))
    runner.replay(batch_of(2))
    assert (outer.compared, inner.compared) == (2, 1)
    assert outer.findings == inner.findings == []


def test_misuse_is_refused(capture, target_of, tiny):
    runner, _ = capture()
    with pytest.raises(gk.ConfigError, match=r"ShadowWatch\.every must be an int >= 1, got 0"):
        ShadowWatch(runner, every=0)
    with pytest.raises(gk.ConfigError, match="tolerance must be a number above 0"):
        ShadowWatch(runner, tolerance=-1)
    planned = target_of(tiny()).runner(VERIFY, device="cpu")
    with pytest.raises(gk.ReplayError, match="observe needs a captured runner"):
        ShadowWatch(planned).__enter__()


def test_the_audit_reports_by_size_and_restores_state(capture, target_of, storing, tiny):
    model = tiny(lambda model, hidden, inputs: storing(model, hidden, inputs) * model.scale)
    target, log = target_of(model), AuditLog()
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        model.scale = 2.0
        audit_shadow(target, runner, log)
    assert [(f.kind, f.batch_size, f.kernel) for f in log.findings] == [
        ("frozen value", 1, "mul"), ("frozen value", 4, "mul"),
    ]  # fmt: skip
    assert [check.findings for check in log.checks] == [1, 1]
    assert not model.cache.any()
