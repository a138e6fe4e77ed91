"""Attention that claims modes which it computes wrongly is refused before a token is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool

VOCAB, HIDDEN, CONTEXT, ROWS = 32, 8, 48, 3
SIZES = gk.BufferSizes(ROWS, CONTEXT, HIDDEN, VOCAB, torch.float32)
CHAIN, TREE = gk.SpecConfig("NGRAM", 2, 1, 3), gk.SpecConfig("NGRAM", 2, 3, 6)
NONE = gk.SpecConfig("NONE", 0, 1, 1)


class Right(SdpaAttention):
    """Attention that graphkit cannot know."""


class IgnoresMode(SdpaAttention):
    """Claims every mode, and computes all as a verify, which counts the rows itself."""

    def metadata(self, mode, inputs):
        return super().metadata(gk.ForwardMode.TARGET_VERIFY, inputs)


class IgnoresMask(SdpaAttention):
    def metadata(self, mode, inputs):
        return replace(super().metadata(mode, inputs), mask=None)


class MisplacesHistory(SdpaAttention):
    """Counts the rows of a packed prefill twice."""

    def metadata(self, mode, inputs):
        metadata = super().metadata(mode, inputs)
        if mode is gk.ForwardMode.DRAFT_EXTEND:
            lengths = metadata.cache_seqlens + inputs.num_accepted_tokens
            metadata = replace(metadata, cache_seqlens=lengths)
        return metadata


class Layer:
    """One layer of attention between two tables."""

    def __init__(self, attention):
        generator = torch.Generator().manual_seed(2)
        self.embedding, self.head = (
            torch.randn(shape, generator=generator) for shape in ((VOCAB, HIDDEN), (HIDDEN, VOCAB))
        )
        self.place = torch.randn(CONTEXT, HIDDEN, generator=generator)
        self.attention = attention

    def __call__(self, inputs):
        rows = self.embedding[inputs.input_ids] + self.place[inputs.positions]
        heads = rows[:, None]
        attended = self.attention.attend(
            0, heads, heads, heads, inputs.out_cache_loc, inputs.attention
        )
        return gk.ForwardOutput(next_token_logits=(rows + attended[:, 0]) @ self.head)


def model_of(kind, slots=ROWS * CONTEXT):
    requests = ReqToTokenPool(ROWS, CONTEXT, "cpu")
    pool = MHATokenToKVPool(slots, 1, torch.float32, 1, HIDDEN, 1, "cpu")
    attention = kind(requests, pool)
    return gk.EngineModel(Layer(attention), attention)


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
    gk.runners.attention_check.check_attention(runner)
    assert 0 < len(rows) <= 8
    assert max(rows) <= 2 * (TREE.num_draft_tokens + 2)
    rows.clear()
    gk.runners.attention_check.check_attention(bare(SdpaAttention, TREE))
    assert rows == [], "attention of graphkit has tests of its own"
