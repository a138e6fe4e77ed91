"""The STEP of a target's engine: captured whole, compared in report and state, and looped."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import graphkit as gk
from engine_target import ROWS, SIZES, Counting, TableForward, engine_target
from graphkit.errors import TargetError
from graphkit.records import CaptureRecord
from graphkit.views.module_tree import node_phases

STEP, DECODE = gk.ForwardMode.STEP, gk.ForwardMode.DECODE


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def record(device):
    """The record of a right step, inspected."""
    return gk.capture_target(engine_target(device), device=device, inspect=True)


def test_every_batch_and_every_loop_is_compared(record):
    (mode,) = record.modes
    assert (mode.mode, mode.eager_reason, record.mismatches) == ("STEP", "", ())
    assert [(size.batch_size, size.batches_compared) for size in mode.sizes] == [(1, 1), (3, 3)]
    assert all(size.replay_us and size.eager_us for size in mode.sizes)
    assert mode.stats.fallbacks == {}
    assert set(mode.stats.replays_by_size) == {1, ROWS}
    assert [loop.kind for loop in mode.loops] == ["greedy", "sampled"]
    for loop in mode.loops:
        assert 1 < loop.steps_compared <= 8
        assert loop.prologue_nodes > 0
        assert [body.batch_size for body in loop.bodies] == [1, ROWS]
        assert all(body.num_nodes > 0 for body in loop.bodies)


def test_a_body_has_the_nodes_of_its_size(record):
    """Without the refresh, and with the node that advances the loop."""
    (mode,) = record.modes
    for body, size in zip(mode.loops[1].bodies, mode.sizes, strict=True):
        assert abs(body.num_nodes - size.num_nodes) <= 2


def test_every_graph_is_inspected_with_its_phases_and_the_names_of_its_state(record):
    assert [graph.name for graph in record.graphs] == ["STEP 1", "STEP 3"]
    for graph in record.graphs:
        measured = {
            phase
            for phase, node in zip(node_phases(graph), graph.nodes, strict=True)
            if node.duration_us
        }
        assert measured == {"", "draft", "build", "verify", "accept", "extend"}
        named = {p.name for node in graph.nodes for a in node.arguments for p in a.pointers}
        assert {
            "remaining",
            "seeds",
            "TARGET_VERIFY attention.req_to_token_pool.req_to_token",
        } <= named


def test_the_record_survives_json_and_an_older_one_has_no_loops(record):
    assert CaptureRecord.from_json(record.to_json()) == record
    older = dataclasses.replace(record, modes=(dataclasses.replace(record.modes[0], loops=()),))
    text = older.to_json().replace('"loops": []', '"later": []')
    assert CaptureRecord.from_json(text) == older


def mismatch_of(target):
    (mismatch, *_) = gk.capture_target(target, device="cpu").mismatches
    assert mismatch.mode == "STEP"
    return mismatch


def test_a_value_that_the_graph_keeps_is_found(device):
    record = gk.capture_target(engine_target(device, drafter=Counting), device=device)
    first = record.mismatches[0]
    assert first.kind == "the graph differs from the same padded path without it"
    assert (first.mode, first.field) == ("STEP", "report")


class Ageing(gk.NgramDrafter):
    """Keeps a number of the host as state of the requests, which changes no token."""

    calls = 0

    def prepare(self, context):
        super().prepare(context)
        self.future_map = context.future_map

    def extend(self, verified):
        super().extend(verified)
        self.calls += 1
        rows = verified.req_pool_indices
        self.future_map.stash(rows, {"age": torch.full_like(rows, self.calls)})

    def prefill_batch(self, batch):
        super().prefill_batch(batch)
        rows = batch.req_pool_indices
        self.future_map.stash(rows, {"age": torch.zeros_like(rows)})


def test_state_that_changes_no_token_is_compared():
    mismatch = mismatch_of(engine_target(drafter=Ageing))
    assert mismatch.field == "future map age"
    assert (mismatch.row, mismatch.request, mismatch.padded_batch_size) == (0, 0, 1)


def test_kv_of_committed_tokens_is_compared():
    class Drifting(TableForward):
        calls = 0

        def key_and_value(self, inputs):
            self.calls += 1
            key, value = super().key_and_value(inputs)
            return key, value + self.calls

    assert mismatch_of(engine_target(forward=Drifting)).field == "KV TARGET_VERIFY value.0"


def test_a_loop_that_differs_from_single_replays_is_found(monkeypatch):
    launch = gk.SpecStepRunner.launch

    def with_other_seeds(runner, rows, **options):
        runner.state.seeds[rows[-1]] += 1
        return launch(runner, rows, **options)

    monkeypatch.setattr(gk.SpecStepRunner, "launch", with_other_seeds)
    first, second = gk.capture_target(engine_target(), device="cpu").mismatches
    assert first.kind == second.kind == "a launch of several steps differs from single replays"
    assert first.field == "seeds of row 3"
    assert first.request == 2
    assert first.got == first.expected + 1
    assert (first.batch_size, first.padded_batch_size) == (ROWS, ROWS)


def test_loops_of_a_step_that_is_not_repeatable_are_not_compared():
    class Drifting(Ageing):
        """Numbers the prompts, so that no request begins as it did before."""

        def extend(self, verified):
            gk.NgramDrafter.extend(self, verified)

        def prefill_batch(self, batch):
            super().prefill_batch(batch)
            self.calls += 1
            rows = batch.req_pool_indices
            self.future_map.stash(rows, {"age": torch.full_like(rows, self.calls)})

    record = gk.capture_target(engine_target(drafter=Drifting), device="cpu")
    assert record.mismatches == ()
    assert [loop.steps_compared for loop in record.modes[0].loops] == [0, 0]


def test_an_engine_with_the_host_in_the_loop_has_no_step():
    record = gk.capture_target(engine_target(generation="v1"), device="cpu")
    (mode,) = record.modes
    assert (mode.mode, mode.sizes, mode.loops) == ("STEP", (), ())
    assert mode.eager_reason == "the engine runs generation v1, as requested"
    assert record.backend == "recorder"


def test_sizes_and_modes_are_selected():
    target = engine_target()
    assert target.modes == (STEP,)
    record = gk.capture_target(target, modes=[STEP], batch_sizes=[2], device="cpu")
    assert [size.batch_size for size in record.modes[0].sizes] == [2, ROWS]
    with pytest.raises(TargetError, match="no forward for DECODE; it has STEP"):
        gk.capture_target(target, modes=[DECODE], device="cpu")
    with pytest.raises(TargetError, match="no forward for STEP, but an engine"):
        target.runner(STEP)


def broken(**_options):
    raise LookupError("no weights today")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"engine": 5}, "engine is 5. Pass a function that returns a graphkit.SpeculativeEngine"),
        ({"engine": broken}, "raised LookupError: no weights today"),
        ({"engine": lambda **_: None}, "engine returned a NoneType. Return a graphkit.Specul"),
        ({"forwards": {STEP: print}}, "a forward for STEP, and an engine whose step is STEP"),
        (
            {"sizes": dataclasses.replace(SIZES, max_batch_size=2), "batch_sizes": [1]},
            "its engine has max_batch_size 2, but the target has 3",
        ),
        ({"slots": 200}, "the pools of its engine hold 2 requests of"),
    ],
    ids=["type", "error", "result", "forward", "size", "pool"],
)
def test_an_invalid_engine_is_refused(facts, text):
    with pytest.raises(TargetError) as caught:
        gk.capture_target(engine_target(**facts), device="cpu")
    assert text in str(caught.value)


def test_an_error_of_graphkit_keeps_its_type():
    small = dataclasses.replace(SIZES, max_context_len=5)
    with pytest.raises(gk.ConfigError, match="max_context_len is 5"):
        gk.capture_target(engine_target(sizes=small), device="cpu")
