"""``capture_target`` passes right models and near ties in every mode, and locates what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from declared_modes import MODES
from graphkit.errors import CaptureCause, CaptureError, ConfigError, TargetError
from graphkit.runners import draft, multi_layer
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.draft import TreeGrowth
from no_metadata import NoMetadata

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
COMPARED = (VERIFY, DRAFT, EXTEND, EXTEND_V2, LAYERS)
GRAPH_BUG = "the graph differs from the same padded path without it"
PADDING_BUG = "padding changes live rows"
LIVE_AT_SIZE = {(1, 2), (2, 2), (1, 4), (2, 4), (3, 4), (4, 4)}
PADDED = {(live, size) for live, size in LIVE_AT_SIZE if live < size}
STEPS = {VERIFY: 1, DRAFT: 2, EXTEND: 1, EXTEND_V2: 1, LAYERS: 3}
"""Forwards in a step of 3."""

both = pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
each_mode = pytest.mark.parametrize("mode", COMPARED, ids=lambda mode: mode.value)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def leak_mean(hidden, inputs):
    """Every row sees the mean over all rows, pads included."""
    return hidden + hidden.mean(0)


def leak_next_row(hidden, inputs):
    """Every row sees the next one; the last sees row 0."""
    return hidden + hidden.roll(-1, 0)


def test_a_first_look_compares_the_least_and_most_requests_of_a_size(make_target):
    sizes = replace(make_target().sizes, max_batch_size=16)
    target = make_target(modes=MODES[:1], sizes=sizes, batch_sizes=[4, 16])
    done = []
    record = gk.capture_target(
        target, device="cpu", compares_all=False, progress=lambda *step: done.append(step)
    )
    compared = {size.batch_size: size.batches_compared for size in record.sizes}
    assert compared == {4: len([1, 2, 3, 4]), 16: len([1, 5, 8, 15, 16])}
    assert done[-1][:2] == (11, 11)


def places(record, kind):
    found = [m for m in record.mismatches if m.kind == kind]
    assert len(found) == len(record.mismatches)
    return {(m.batch_size, m.padded_batch_size) for m in found}


@both
@each_dtype
def test_a_right_model_is_right_in_every_mode(make_target, topk, dtype):
    target = make_target(modes=MODES, topk=topk, dtype=dtype)
    record = gk.capture_target(target, device="cpu")
    assert (record.target, record.backend, record.mismatches) == ("tiny", "recorder", ())
    assert [mode.mode for mode in record.modes] == [mode.name for mode in MODES]
    widths = [mode.tokens_per_request for mode in record.modes]
    assert widths == [target.spec.tokens_per_request(mode) for mode in MODES]
    for size in record.sizes:
        assert size.batches_compared == size.batch_size
        assert size.largest_difference <= 16 * torch.finfo(dtype).eps
        assert min(size.replay_us, size.eager_us, size.num_nodes, size.capture_ms) > 0
    for mode in record.modes:
        assert [size.batch_size for size in mode.sizes] == [2, 4]
        for size in mode.sizes:
            assert size.num_tokens == size.batch_size * mode.tokens_per_request
    assert gk.CaptureRecord.from_json(record.to_json()) == record


@both
@each_mode
def test_a_leak_is_found_wherever_there_are_pads(make_target, mode, topk):
    record = gk.capture_target(make_target(leak_mean, modes=[mode], topk=topk), device="cpu")
    found = places(record, PADDING_BUG)
    # Rows of DRAFT_EXTEND vary: there are pads in a full batch too.
    assert PADDED <= found <= (LIVE_AT_SIZE if mode is EXTEND else PADDED)
    field = "next_token_logits" + (" of step 0" if STEPS[mode] > 1 else "")
    assert {m.field for m in record.mismatches} == {field}
    assert max(size.largest_difference for size in record.sizes) > 1e-3


@both
@each_mode
def test_the_request_that_is_wrong_is_named(make_target, mode, topk):
    """Only the last live row has a pad after it."""
    target = make_target(leak_next_row, modes=[mode], topk=topk)
    record = gk.capture_target(target, device="cpu")
    assert places(record, PADDING_BUG) >= PADDED
    for mismatch in record.mismatches:
        batch = target.batch(mode, mismatch.batch_size, SEED + mismatch.batch_size)
        assert mismatch.row == batch.num_tokens - 1
        assert mismatch.request == mismatch.batch_size - 1


def test_packed_rows_are_assigned_to_their_request(make_target):
    """A wrong row in the middle of packed ones."""

    def leak_into_request_1(hidden, inputs):
        first = inputs.num_accepted_tokens[:1].long().clamp(max=len(hidden) - 1)  # its first row
        return hidden.index_add(0, first, hidden.sum(0, keepdim=True))

    record = gk.capture_target(make_target(leak_into_request_1, modes=[EXTEND]), device="cpu")
    wrong = [m for m in record.mismatches if m.batch_size > 1]
    assert wrong
    assert {m.request for m in wrong} == {1}
    assert max(m.row for m in wrong) > 1


@pytest.mark.parametrize(("mode", "step"), [(DRAFT, 1), (LAYERS, 1), (LAYERS, 2)])
def test_the_step_that_is_wrong_is_named(make_target, mode, step):
    calls = iter(range(10**6))

    def leak_once(hidden, inputs):
        return leak_mean(hidden, inputs) if next(calls) % STEPS[mode] == step else hidden

    record = gk.capture_target(make_target(leak_once, modes=[mode]), device="cpu")
    assert places(record, PADDING_BUG) == PADDED
    assert {m.field for m in record.mismatches} == {f"next_token_logits of step {step}"}


@both
@each_dtype
@each_mode
def test_near_ties_are_no_leak(make_target, mode, topk, dtype):
    """One token is more probable by one rounding; which one depends on the batch size."""

    def tied(inputs):
        logits = torch.zeros(inputs.num_tokens, 32, dtype=dtype)
        logits[:, inputs.batch_size :: 7] += torch.finfo(dtype).eps
        return gk.ForwardOutput(next_token_logits=logits, hidden_states=logits[:, :8].clone())

    forward = [tied] * 3 if mode is LAYERS else tied
    target = make_target(forwards={mode: forward}, topk=topk, dtype=dtype)
    record = gk.capture_target(target, device="cpu")
    assert record.mismatches == ()
    assert max(size.largest_difference for size in record.sizes) == torch.finfo(dtype).eps


@both
@each_dtype
def test_choices_that_padding_changes_are_found(make_target, monkeypatch, topk, dtype):
    """The forwards are right, but the choice among their candidates is not."""
    owner, name = (draft, "chain_candidates") if topk == 1 else (TreeGrowth, "best")
    choose = getattr(owner, name)

    def of_the_next_request(*given):
        return tuple(rows.roll(-1, 0) for rows in choose(*given))

    monkeypatch.setattr(owner, name, of_the_next_request)
    record = gk.capture_target(make_target(modes=[DRAFT], topk=topk, dtype=dtype), device="cpu")
    assert places(record, PADDING_BUG) == PADDED
    names = {"parent_list", "top_scores_index", "draft_tokens"}
    for mismatch in record.mismatches:
        assert mismatch.field in names
        assert mismatch.request == mismatch.row == mismatch.batch_size - 1


def test_a_chosen_token_of_another_layer_is_found(make_target, monkeypatch):
    """Integers beside floats: the leak is in the last layer, after which no forward reads it."""
    top, calls = multi_layer.top_candidates, iter(range(10**6))

    def shifted(*given, **options):
        topk_p, topk_index = top(*given, **options)
        return topk_p, topk_index.roll(-1, 0) if next(calls) % 3 == 2 else topk_index

    monkeypatch.setattr(multi_layer, "top_candidates", shifted)
    record = gk.capture_target(make_target(modes=[LAYERS]), device="cpu")
    assert {(1, 2), (3, 4)} <= places(record, PADDING_BUG) <= PADDED
    assert {m.field for m in record.mismatches} == {"topk_index"}
    assert {m.request == m.batch_size - 1 for m in record.mismatches} == {True}


@each_mode
def test_a_frozen_python_value_is_a_graph_bug(make_target, mode):
    calls = []

    def drift(hidden, inputs):
        calls.append(1)
        return hidden.roll(len(calls), -1)

    record = gk.capture_target(make_target(drift, modes=[mode]), device="cpu")
    graph_bugs = [m for m in record.mismatches if m.kind == GRAPH_BUG]
    assert len(graph_bugs) > len(LIVE_AT_SIZE) / 2


def test_a_graph_bug_names_the_request_of_its_row(make_target):
    calls = []

    def drift_from_row_5_on(hidden, inputs):
        calls.append(1)
        return torch.cat([hidden[:5], hidden[5:] * len(calls)])

    record = gk.capture_target(make_target(drift_from_row_5_on, modes=[EXTEND_V2]), device="cpu")
    found = [m for m in record.mismatches if m.kind == GRAPH_BUG]
    assert {(m.batch_size, m.padded_batch_size) for m in found} == {(2, 2), (2, 4), (3, 4), (4, 4)}
    assert {(m.row, m.request) for m in found} == {(5, 1)}


@each_mode
def test_fields_missing_in_every_run_are_left_out(make_target, mode):
    def without_hidden_states(inputs):
        output = target.forwards[EXTEND](inputs)
        return gk.ForwardOutput(next_token_logits=output.next_token_logits)

    target = make_target(modes=[EXTEND])
    forwards = {mode: without_hidden_states}
    if mode is LAYERS:  # the next layer reads them; no layer reads those of the last
        forwards = {mode: [target.forwards[EXTEND]] * 2 + [without_hidden_states]}
    record = gk.capture_target(make_target(forwards=forwards), device="cpu")
    assert record.mismatches == ()
    assert {size.batches_compared for size in record.sizes} == {2, 4}


def test_a_field_that_only_one_run_has_is_a_difference(make_target):
    def sometimes(inputs):
        output = target.forwards[EXTEND_V2](inputs)
        if inputs.batch_size == 3:
            output.hidden_states = None
        return output

    target = make_target(modes=[EXTEND_V2])
    record = gk.capture_target(make_target(forwards={EXTEND_V2: sometimes}), device="cpu")
    assert places(record, PADDING_BUG) == {(3, 4)}
    assert record.mismatches[0].field == "hidden_states"


@each_mode
def test_declared_state_is_restored_around_every_run(make_target, mode):
    counter = torch.tensor([3.0])

    def step(hidden, inputs):
        counter.add_(1)
        return hidden.roll(1, -1) * counter

    target = make_target(step, modes=[mode], mutable_state={"counter": counter})
    assert gk.capture_target(target, device="cpu").mismatches == ()
    assert counter.item() == 3


def test_a_mode_that_stays_eager_has_no_sizes(make_target):
    seen = []
    target = make_target(modes=[EXTEND, EXTEND_V2, LAYERS], attention=NoMetadata(EXTEND_V2))
    record = gk.capture_target(target, device="cpu", progress=lambda *step: seen.append(step))
    assert record.mismatches == ()
    sizes = {mode.mode: [size.batch_size for size in mode.sizes] for mode in record.modes}
    assert sizes == {"DRAFT_EXTEND": [2, 4], "DRAFT_EXTEND_V2": [], "MULTI_LAYER_EAGLE": []}
    assert seen[-1] == (8, 8, "MULTI_LAYER_EAGLE stays eager")
    assert gk.CaptureRecord.from_json(record.to_json()) == record


def found(record):
    return {(m.kind, m.batch_size, m.padded_batch_size) for m in record.mismatches}


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


def test_undeclared_state_is_a_graph_bug(make_target):
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
