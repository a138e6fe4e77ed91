"""``capture_target`` passes a right model, and locates what is wrong in others."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.errors import CaptureCause, CaptureError, ConfigError, TargetError
from graphkit.runners.comparison.step_comparison import SEED

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
GRAPH_BUG = "the graph differs from the same padded path without it"
PADDING_BUG = "padding changes live rows"
LIVE_AT_SIZE = [(1, 2), (2, 2), (1, 4), (2, 4), (3, 4), (4, 4)]
PADDED = [(live, size) for live, size in LIVE_AT_SIZE if live < size]


def leak_mean(hidden, inputs):
    """Every row sees the mean over all rows, pads included."""
    return hidden + hidden.mean(0)


def leak_next_row(hidden, inputs):
    """Every row sees the next one; the last sees row 0."""
    return hidden + hidden.roll(-1, 0)


def found(record):
    return {(m.kind, m.batch_size, m.padded_batch_size) for m in record.mismatches}


def test_a_right_model_gives_a_complete_record(make_target):
    target = make_target()
    target = make_target(
        forwards={VERIFY: target.forwards[VERIFY], DECODE: target.forwards[VERIFY]}
    )
    record = gk.capture_target(target, device="cpu")
    assert (record.target, record.backend, record.mismatches) == ("tiny", "recorder", ())
    assert [(m.mode, m.tokens_per_request) for m in record.modes] == [
        ("TARGET_VERIFY", 4), ("DECODE", 1),
    ]  # fmt: skip
    for mode in record.modes:
        assert [size.batch_size for size in mode.sizes] == [2, 4]
        for size in mode.sizes:
            assert size.num_tokens == size.batch_size * mode.tokens_per_request
            assert size.batches_compared == size.batch_size
            assert size.largest_difference < 1e-5
            assert min(size.replay_us, size.eager_us, size.num_nodes, size.capture_ms) > 0
    assert gk.CaptureRecord.from_json(record.to_json()) == record


def test_modes_and_sizes_can_be_chosen(make_target):
    forward = make_target().forwards[VERIFY]
    target = make_target(forwards={VERIFY: forward, DECODE: forward})
    record = gk.capture_target(target, modes=[DECODE], batch_sizes=[1, 3], device="cpu")
    assert [mode.mode for mode in record.modes] == ["DECODE"]
    assert [size.batch_size for size in record.modes[0].sizes] == [1, 3, 4]


def test_progress_counts_up_to_its_total(make_target):
    seen = []
    gk.capture_target(make_target(), device="cpu", progress=lambda *step: seen.append(step))
    total = 2 + 2 + 4
    assert [step[:2] for step in seen] == [(done, total) for done in range(total + 1)]
    assert seen[0][2] == "TARGET_VERIFY capturing 4"
    assert seen[-1][2] == "TARGET_VERIFY comparing 4 at 4"


def test_a_leak_over_all_rows_is_a_padding_bug_wherever_there_are_pads(make_target):
    target = make_target(leak_mean)
    record = gk.capture_target(target, device="cpu")
    assert found(record) == {(PADDING_BUG, *place) for place in PADDED}
    first = record.mismatches[0]
    assert (first.mode, first.field, first.row, first.request) == (
        "TARGET_VERIFY", "next_token_logits", 0, 0,
    )  # fmt: skip
    assert abs(first.expected - first.got) > 1e-3


def test_the_row_and_the_request_that_are_wrong_are_named(make_target):
    """Only the last live row has a pad after it."""
    record = gk.capture_target(make_target(leak_next_row), device="cpu")
    assert found(record) == {(PADDING_BUG, *place) for place in PADDED}
    for mismatch in record.mismatches:
        assert mismatch.row == mismatch.batch_size * 4 - 1
        assert mismatch.request == mismatch.batch_size - 1


def test_a_mismatch_holds_both_values_of_the_model(make_target):
    """Computed by hand: pads have token 0, live rows those of the batch."""
    target = make_target(leak_next_row)
    record = gk.capture_target(target, device="cpu")
    first = record.mismatches[0]
    batch = target.sample_batch(VERIFY, 1, SEED + 1)
    forward = target.forwards[VERIFY]
    with torch.no_grad():
        eager = forward(batch).next_token_logits[first.row]
        batch.input_ids = torch.cat([batch.input_ids, torch.zeros(4, dtype=torch.int64)])
        padded = forward(batch).next_token_logits[first.row]
    column = int((eager - padded).abs().argmax())
    assert first.expected == pytest.approx(float(eager[column]))
    assert first.got == pytest.approx(float(padded[column]))


def test_a_leak_is_seen_beside_masked_logits(make_target):
    """Minus infinity for forbidden tokens is common, and must not widen the tolerance."""
    target = make_target(leak_mean)
    forward = target.forwards[VERIFY]

    def masked(inputs):
        output = forward(inputs)
        output.next_token_logits = output.next_token_logits.index_fill(
            1, torch.tensor([3]), -torch.inf
        )
        return output

    record = gk.capture_target(make_target(forwards={VERIFY: masked}), device="cpu")
    assert found(record) == {(PADDING_BUG, *place) for place in PADDED}


def test_a_frozen_python_value_is_a_graph_bug_at_every_size(make_target):
    calls = []

    def count(hidden, inputs):
        calls.append(1)
        return hidden * len(calls)

    record = gk.capture_target(make_target(count), device="cpu")
    assert {(GRAPH_BUG, *place) for place in LIVE_AT_SIZE} <= found(record)


def test_declared_state_is_restored_around_every_run(make_target):
    counter, cache = torch.tensor([3.0]), torch.arange(64.0)[:, None].repeat(1, 8)
    before = counter.clone(), cache.clone()

    def step(hidden, inputs):
        counter.add_(1)
        cache.index_add_(0, inputs.out_cache_loc, hidden)
        return cache[inputs.out_cache_loc] + counter

    state = {"counter": counter, "cache": cache}
    assert gk.capture_target(make_target(step, mutable_state=state), device="cpu").mismatches == ()
    assert torch.equal(counter, before[0])
    assert torch.equal(cache, before[1])
    undeclared = gk.capture_target(make_target(step), device="cpu")
    assert {(GRAPH_BUG, *place) for place in LIVE_AT_SIZE} <= found(undeclared)


def test_state_is_restored_when_a_forward_fails(make_target):
    counter = torch.zeros(1)

    def step(hidden, inputs):
        counter.add_(1)
        return hidden[: int(counter)] if inputs.num_tokens == 4 else hidden

    with pytest.raises(gk.GraphkitError):
        gk.capture_target(make_target(step, mutable_state={"counter": counter}), device="cpu")
    assert counter.item() == 0


def test_a_failed_capture_names_mode_size_and_line(make_target):
    def step(hidden, inputs):
        return hidden * inputs.seq_lens.max().item()

    with pytest.raises(CaptureError) as caught:
        gk.capture_target(make_target(step), device="cpu")
    error = caught.value
    assert (error.mode, error.batch_size, error.cause) == (
        "TARGET_VERIFY", 4, CaptureCause.HOST_SYNCHRONISATION,
    )  # fmt: skip
    assert f"{__file__}:{step.__code__.co_firstlineno + 1} " in str(error)


def test_a_mode_without_a_forward_is_refused_with_the_modes_that_have_one(make_target):
    with pytest.raises(TargetError, match="'tiny' has no forward for DECODE; it has TARGET_VERIFY"):
        gk.capture_target(make_target(), modes=[DECODE], device="cpu")


@pytest.mark.parametrize("forwards", [{}, {gk.ForwardMode.IDLE: print}, {"TARGET_VERIFY": print}])
def test_forwards_without_a_runner_are_refused(make_target, forwards):
    with pytest.raises((TargetError, ConfigError)):
        gk.capture_target(make_target(forwards=forwards), device="cpu")


def test_a_sample_of_another_size_than_asked_is_refused(make_target):
    """The record must not count batches that did not run."""
    one = make_target().sample_batch
    target = make_target(sample_batch=lambda mode, batch_size, seed: one(mode, 1, seed))
    with pytest.raises(TargetError, match="sample_batch"):
        gk.capture_target(target, device="cpu")
