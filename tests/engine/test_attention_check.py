"""Attention that claims modes which it computes wrongly is refused before a token is wrong."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from claimed_attention import (
    CHAIN,
    NONE,
    ROWS,
    SIZES,
    TREE,
    IgnoresMask,
    IgnoresMode,
    Layer,
    MisplacesHistory,
    Right,
    model_of,
)
from graphkit.engine.attention import SdpaAttention


def options(spec):
    return {"spec": spec, "sizes": SIZES, "batch_sizes": [ROWS], "device": "cpu"}


def bare(kind, spec, **more):
    model, runner = model_of(kind), gk.DecodeRunner if spec is NONE else gk.TargetVerifyRunner
    return runner(model.forward, attention=model.attention, **options(spec), **more)


def step_runner(kind, spec, **more):
    drafter = None if spec is NONE else gk.NgramDrafter()
    return gk.SpecStepRunner(model_of(kind), drafter, **options(spec), **more)


def engine(kind, spec, generation):
    drafter = None if spec is NONE else gk.NgramDrafter()
    return gk.SpeculativeEngine(model_of(kind), drafter, generation=generation, **options(spec))


PREFILL = r"MisplacesHistory supports DRAFT_EXTEND, .* first in request 0 at position 0"
MASK = r"IgnoresMask supports TARGET_VERIFY, .* a tree .* first in request 0 at position 3"
CASES = [
    (MisplacesHistory, CHAIN, PREFILL),
    (MisplacesHistory, NONE, PREFILL),
    (MisplacesHistory, TREE, PREFILL),
    (IgnoresMode, CHAIN, PREFILL.replace("MisplacesHistory", "IgnoresMode")),
    (IgnoresMask, TREE, MASK),
]


@pytest.mark.parametrize("make", [bare, step_runner])
@pytest.mark.parametrize(("kind", "spec", "message"), CASES)
def test_a_capture_refuses_what_the_attention_does_not_compute(make, kind, spec, message):
    with make(kind, spec) as runner, pytest.raises(gk.AttentionError, match=message):
        runner.capture()


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize(("kind", "spec", "message"), [CASES[0], *CASES[-2:]])
def test_an_engine_refuses_it_before_the_first_token(captures, generation, kind, spec, message):
    with engine(kind, spec, generation) as made:
        request = made.submit([1, 2, 3])
        with pytest.raises(gk.AttentionError, match=message):
            made.capture() if captures else made.step()
        assert request.output_ids == []


@pytest.mark.parametrize("make", [bare, step_runner])
def test_the_comparison_can_be_left_out(make):
    with make(IgnoresMask, TREE, check=False) as runner:
        runner.capture()


@pytest.mark.parametrize("spec", [CHAIN, TREE, NONE])
@pytest.mark.parametrize("make", [bare, step_runner])
def test_it_changes_no_slot_row_or_random_number(make, spec):
    with make(Right, spec) as runner:
        attention = runner.attention or runner.spec_step.verifier.runner.attention
        tensors = [attention.req_to_token_pool.req_to_token[1:]]
        tensors += [each[1:] for each in attention.kv_pool.tensors().values()]
        for tensor in tensors:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 7)
        before = [tensor.clone() for tensor in tensors]
        state = torch.get_rng_state()
        runner.capture()
        assert torch.equal(torch.get_rng_state(), state)
        for tensor, saved in zip(tensors, before, strict=True):
            assert torch.equal(tensor, saved)


def test_it_runs_few_short_batches(monkeypatch):
    rows = []
    call = Layer.__call__

    def counted(self, inputs):
        rows.append(inputs.num_tokens)
        return call(self, inputs)

    monkeypatch.setattr(Layer, "__call__", counted)
    runner = bare(Right, TREE)
    gk.runners.capture_checks.check_attention(runner)
    assert 0 < len(rows) <= 8
    assert max(rows) <= 2 * (TREE.num_draft_tokens + 2)
    rows.clear()
    gk.runners.capture_checks.check_attention(bare(SdpaAttention, TREE))
    assert rows == [], "attention of graphkit has tests of its own"


class DraftsByTrees(gk.CustomSpecAlgorithm):
    """Captures TARGET_VERIFY on the worker of its draft model, too, whose rows are causal."""

    def supports_target_verify_for_draft(self):
        return True


@pytest.fixture(scope="module")
def of_drafts():
    gk.register_algorithm("CHECKED_DRAFTS", DraftsByTrees)
    return gk.SpecConfig("CHECKED_DRAFTS", 2, 3, 6, is_draft_worker=True)


def test_a_draft_worker_with_causal_rows_is_compared(of_drafts):
    with bare(Right, of_drafts) as runner:
        runner.capture()
    with bare(IgnoresMask, of_drafts) as runner, pytest.raises(gk.AttentionError, match=MASK):
        runner.capture()
