"""Drawn batches are valid in every mode, and reach the boundaries of validity."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings, strategies as st

import graphkit as gk
from declared_modes import MODES, every_mode
from graphkit.buffers import Axis, declare
from graphkit.runners import RUNNERS
from graphkit.testing import assert_replay_equivalent, batches, target_batches

VERIFY, DRAFT = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DRAFT
EXTEND, EXTEND_V2 = gk.ForwardMode.DRAFT_EXTEND, gk.ForwardMode.DRAFT_EXTEND_V2
LAYERS = gk.ForwardMode.MULTI_LAYER_EAGLE
STEPS, CONTEXT, PAGE, VOCAB = 3, 40, 4, 50
SIZES = gk.BufferSizes(5, CONTEXT, 8, VOCAB, torch.bfloat16, page_size=PAGE, spec_hidden_size=24)
few = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
once = settings(few, max_examples=500, database=None)
unshrunk = settings(once, phases=[Phase.generate])


def spec_of(topk, algorithm="EAGLE"):
    return gk.SpecConfig(algorithm, STEPS, topk, STEPS + 1 if topk == 1 else 8)


def numbers(rows):
    return torch.as_tensor(rows).double().numpy()


CASES = {
    **{f"{mode.value}-{topk}": (mode, spec_of(topk), {}) for mode in MODES for topk in (1, 2)},
    "front tokens": (LAYERS, spec_of(1), {"num_front_tokens": 2}),
    "standalone": (DRAFT, spec_of(2, "STANDALONE"), {}),
    "mrope": (VERIFY, spec_of(1), {"optional_fields": ["mrope_positions", "input_embeds"]}),
    "temperatures": (LAYERS, spec_of(1), {"optional_fields": ["temperatures"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_drawn_batches_are_valid(case):
    mode, spec, options = CASES[case]
    forward = [print] * STEPS if mode is LAYERS else print
    runner = RUNNERS[mode](forward, spec=spec, sizes=SIZES, device="cpu", **options)
    pages = CONTEXT // PAGE

    @few
    @given(batches(mode, spec, SIZES, **options))
    def check(batch):
        assert runner.dispatch.decide(batch, "captured")  # can_replay, had it been captured
        rows, slots = batch.req_pool_indices, batch.out_cache_loc
        assert len(set(rows.tolist())) == len(rows) <= SIZES.max_batch_size
        assert len(set(slots.tolist())) == len(slots)
        counts = getattr(batch, "extend_seq_lens", None)
        if counts is None:
            counts = np.full(len(rows), len(slots) // len(rows))
        owner = rows.repeat(counts)
        assert (slots // PAGE - 1 >= (owner - 1) * pages).all()
        assert (slots // PAGE - 1 < owner * pages).all()
        assert (batch.positions >= 1).all()
        assert (batch.positions < CONTEXT).all()
        assert (batch.seq_lens <= CONTEXT).all()

    check()


@pytest.mark.parametrize(("mode", "appended"), [(VERIFY, 4), (EXTEND_V2, 0), (EXTEND, 0)])
def test_slots_are_those_that_the_table_has_at_the_positions(mode, appended):
    table = torch.randperm(6 * CONTEXT).view(6, CONTEXT).int()

    @few
    @given(batches(mode, spec_of(1), SIZES, table=table))
    def check(batch):
        rows = len(batch.out_cache_loc) // len(batch.req_pool_indices)
        counts = getattr(batch, "extend_seq_lens", np.full(len(batch.req_pool_indices), rows))
        owner = batch.req_pool_indices.repeat(counts)
        assert (batch.out_cache_loc == table[owner, batch.positions].numpy()).all()
        ends = batch.positions[counts.cumsum() - 1] + 1
        assert (ends == batch.seq_lens + appended).all()

    check()


def test_the_branches_of_a_draft_write_behind_the_committed_tokens():
    @few
    @given(batches(DRAFT, spec_of(2), SIZES))
    def check(batch):
        slots = batch.out_cache_loc.reshape(len(batch.seq_lens), -1)
        first = PAGE + (batch.req_pool_indices - 1) * CONTEXT + batch.seq_lens
        assert (slots == first[:, None] + np.arange(2 * STEPS)).all()
        assert (batch.positions == batch.seq_lens.repeat(2)).all()

    check()


def test_masks_are_trees():
    @few
    @given(batches(VERIFY, spec_of(2), SIZES))
    def check(batch):
        mask = batch.custom_mask
        assert mask[:, :, 0].all()
        assert (mask == np.tril(mask)).all()
        depth = mask.sum(2) - 1
        assert (batch.positions.reshape(depth.shape) - depth == batch.seq_lens[:, None]).all()
        for tree in mask:  # ancestors see a subset of what their descendants see
            assert all(not (tree[seen] & ~tree[node]).any() for node, seen in np.argwhere(tree))

    check()


LONGEST = CONTEXT - 4


@pytest.mark.parametrize(
    ("mode", "is_there"),
    [
        (VERIFY, lambda batch: len(batch.seq_lens) == 1),
        (VERIFY, lambda batch: len(batch.seq_lens) == SIZES.max_batch_size),
        (VERIFY, lambda batch: len(batch.seq_lens) > 2 and (batch.seq_lens == LONGEST).all()),
        (VERIFY, lambda batch: len(batch.seq_lens) > 2 and (batch.seq_lens == 1).all()),
        (VERIFY, lambda batch: PAGE - 1 in batch.seq_lens),
        (VERIFY, lambda batch: PAGE in batch.seq_lens and len(batch.seq_lens) > 1),
        (VERIFY, lambda batch: PAGE + 1 in batch.seq_lens and CONTEXT - 4 in batch.seq_lens),
        (VERIFY, lambda batch: (batch.input_ids == VOCAB - 1).all()),
        (VERIFY, lambda batch: len(batch.input_ids) > 4 and len({*batch.input_ids.tolist()}) == 1),
        (VERIFY, lambda batch: len({*batch.input_ids.tolist()}) > 8),
        (EXTEND, lambda batch: len(batch.seq_lens) > 2 and (batch.num_accepted_drafts == 0).all()),
        (EXTEND, lambda batch: len(batch.seq_lens) > 2 and (batch.num_accepted_tokens == 4).all()),
        (EXTEND, lambda batch: len({*batch.num_accepted_tokens.tolist()}) > 2),
        (EXTEND, lambda batch: not batch.hidden_states.any()),
        (EXTEND, lambda batch: batch.hidden_states.abs().max() > 500),
    ],
)
def test_boundaries_are_reached(mode, is_there):
    assert is_there(find(batches(mode, spec_of(1), SIZES), is_there, settings=unshrunk))


def test_the_simplest_batch_is_simple():
    batch = find(batches(VERIFY, spec_of(1), SIZES), lambda _batch: True, settings=once)
    assert (batch.batch_size, batch.seq_lens.tolist()) == (1, [1])


@pytest.fixture
def make_inputs():
    return lambda **fields: dataclasses.make_dataclass(
        "OwnInputs",
        [(name, object, field) for name, field in fields.items()],
        bases=(gk.TargetVerifyInputs,),
        kw_only=True,
        eq=False,
    )


def test_further_fields_are_drawn_from_their_declaration(make_inputs):
    inputs_type = make_inputs(
        adapter=declare(Axis.REQUEST, torch.int64, "which adapter", pad=7),
        scale=declare(Axis.TOKEN, torch.float32, "how much", row=(2,)),
    )

    @few
    @given(batches(VERIFY, spec_of(1), SIZES, inputs_type=inputs_type))
    def check(batch):
        assert isinstance(batch, inputs_type)
        assert (batch.adapter == 7).all()
        assert batch.scale.shape == (batch.num_tokens, 2)
        assert (batch.scale > 0).all()

    check()


def test_requests_without_room_are_refused():
    sizes = gk.BufferSizes(5, 4, 8, VOCAB, torch.float32)
    with pytest.raises(gk.ConfigError, match="no room for the 4 that a TARGET_VERIFY step writes"):
        batches(VERIFY, spec_of(1), sizes)
    with pytest.raises(gk.ConfigError, match="no room"):
        batches(VERIFY, spec_of(1), SIZES, table=np.zeros((1, CONTEXT)))


@pytest.mark.slow
@every_mode
def test_real_models_are_right_on_drawn_batches(real_target, mode):
    attention = real_target.attention[mode]
    table = attention.req_to_token_pool.req_to_token
    drawn = batches(mode, real_target.spec, real_target.sizes, table=table)
    with real_target.runner(mode, batch_sizes=[2], device="cpu") as runner:
        runner.capture()

        @settings(few, max_examples=12)
        @given(st.one_of(drawn, target_batches(real_target, mode)))
        def check(batch):
            assert_replay_equivalent(runner, [batch])

        check()


def test_target_batches_reorder_and_repeat(target_of):
    """Requests are reordered; ids may all be the largest, or one id repeated."""
    target = target_of(lambda rows: rows)
    drawn = target_batches(target, VERIFY)

    def is_reversed(batch):
        return batch.req_pool_indices.tolist() == [3, 2, 1]

    batch = find(drawn, is_reversed, settings=once)
    assert batch.out_cache_loc.tolist() == [5, 6, 3, 4, 1, 2]
    largest = find(drawn, lambda batch: (batch.input_ids == 15).all(), settings=once)
    assert isinstance(largest.input_ids, torch.Tensor)
    same = find(
        drawn, lambda b: b.batch_size > 1 and len({*b.input_ids.tolist()}) == 1, settings=once
    )
    assert same.batch_size > 1


def test_a_mistake_at_a_boundary_is_found_and_shrunk(target_of):
    """Only the largest id is wrong, and only next to a pad row."""
    target = target_of(lambda rows: rows + rows[:, -1:] * rows.mean(0))
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()

        def is_wrong(batch):
            try:
                assert_replay_equivalent(runner, [batch])
            except AssertionError:
                return True
            return False

        batch = find(target_batches(target, VERIFY), is_wrong, settings=once)
    assert batch.batch_size == 1  # which is padded to a larger size, too


@pytest.mark.slow
def test_the_kit_loads_torch_and_hypothesis_when_they_are_needed():
    code = (
        "import sys, graphkit.testing, graphkit.testing.plugin\n"
        "assert not {'torch', 'numpy', 'hypothesis'} & set(sys.modules)\n"
        "graphkit.testing.assert_replay_equivalent\n"
        "assert 'torch' in sys.modules and 'hypothesis' not in sys.modules\n"
        "try: graphkit.testing.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
