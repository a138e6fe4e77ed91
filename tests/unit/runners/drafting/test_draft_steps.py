"""DRAFT: what the forward of each step is given, and what it leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graphkit import AttentionBackend, ForwardOutput
from graphkit.buffers import Axis, DraftInputs
from graphkit.runners import DraftExtendOutput

SHAPES = [(4, 1, 5), (2, 3, 5), (3, 2, 6), (4, 3, 17)]
INPUTS = ("topk_p", "topk_index", "hidden_states", "positions", "out_cache_loc", "seq_lens")


@pytest.mark.parametrize("way", ["fall_back", "padded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_step_sees_its_rows(draft_case, shape, way):
    case = draft_case(*shape)
    steps, topk, _ = shape
    runner, batch = case.runner(), case.batch(3, seed=2)
    case.model.seen.clear()
    if way == "padded":
        runner.run_padded(batch)
    else:
        runner.fall_back(batch)
    assert len(case.model.seen) == steps - 1
    hands, requests = case.by_hand(batch), 3 if way == "fall_back" else 4
    for step, seen in enumerate(case.model.seen):
        due = [view for hand in hands for view in hand.views[step]]
        for name in ("input_ids", "positions", "out_cache_loc", "hidden_states"):
            assert len(seen[name]) == requests * topk, name
            assert seen[name][: 3 * topk].tolist() == [view[name] for view in due], name
        assert seen["seq_lens"][:3].tolist() == batch.seq_lens.tolist()
        assert seen["req_pool_indices"][:3].tolist() == batch.req_pool_indices.tolist()
        if topk == 1:
            assert "custom_mask" not in seen
        else:
            mask = seen["custom_mask"]
            assert (mask.dtype, mask.shape) == (torch.bool, (requests, topk, topk * steps))
            assert mask[:3].flatten(0, 1).tolist() == [view["custom_mask"] for view in due]


def test_pad_rows_stay_in_slot_0(draft_case):
    case = draft_case(3, 2, 6)
    runner = case.runner()
    case.model.seen.clear()
    runner.run_padded(case.batch(3))
    for step, seen in enumerate(case.model.seen):
        assert seen["out_cache_loc"][6:].tolist() == [0, 0]
        assert seen["req_pool_indices"][3:].tolist() == [0]
        assert seen["positions"][6:].tolist() == [step, step]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_replay_leaves_its_inputs_as_it_found_them(draft_case, poison, shape):
    case = draft_case(*shape)
    runner = case.runner()
    for seed in range(3):
        batch = case.batch(3, seed=seed)
        poison(runner)
        runner.replay(batch)
        view = runner.buffers.view(4)
        for name in INPUTS:
            given, rows = torch.as_tensor(getattr(batch, name)), getattr(view, name)
            assert torch.equal(rows[: len(given)], given.to(rows.dtype)), name
            assert rows[len(given) :].eq(name == "seq_lens").all(), name
        assert (view.input_ids, view.custom_mask, view.attention) == (None, None, None)


def test_what_the_caller_gave_is_not_changed(draft_case):
    case = draft_case(3, 2, 6)
    batch = case.batch(3, kind=torch.from_numpy)
    before = {name: getattr(batch, name).clone() for name in INPUTS}
    runner = case.runner()
    for way in (runner.fall_back, runner.replay, runner.run):
        way(batch)
        for name, rows in before.items():
            assert torch.equal(getattr(batch, name), rows), name
        assert (batch.input_ids, batch.custom_mask) == (None, None)


def test_the_pool_holds_what_the_branches_wrote(draft_case):
    """Of the graph's own writes, each slot [b, k, s] has branch k's key of step s."""
    case = draft_case(3, 2, 6)
    runner, batch = case.runner(), case.batch(3, seed=7)
    case.model.cache.fill_(-1)
    runner.replay(batch)
    slots = batch.out_cache_loc.reshape(3, 2, 3)
    for request, hand in enumerate(case.by_hand(batch)):
        for step, views in enumerate(hand.views):
            keys = [view["input_ids"] + 3 * view["positions"] for view in views]
            assert case.model.cache[slots[request, :, step]].tolist() == keys
        assert case.model.cache[slots[request, :, 2]].tolist() == [-1, -1], "no forward, no write"


def test_mrope_positions_move_on_with_the_steps(draft_case):
    case = draft_case(3, 2, 6)
    runner = case.runner(optional_fields=["mrope_positions"])
    planes = np.arange(18).reshape(3, 6)
    batch = case.batch(3, mrope_positions=planes)
    expected = runner.fall_back(batch)
    assert [seen["mrope_positions"].tolist() for seen in case.model.seen[-2:]] == [
        planes.tolist(),
        (planes + 1).tolist(),
    ]
    got = runner.replay(batch)
    assert torch.equal(got.draft_tokens, expected.draft_tokens)
    assert runner.buffers.view(3).mrope_positions.tolist() == planes.tolist()


@pytest.mark.parametrize("topk", [1, 3])
def test_metadata_is_made_for_each_step(draft_case, topk):
    """The keys of a chain end at its step; a tree's mask speaks of all its draft slots."""

    class Spy(AttentionBackend):
        seq_len_fill_value = 5

        def supports(self, mode):
            return mode.is_draft()

        def init_state(self, sizes, max_tokens):
            self.max_tokens = max_tokens

        def metadata(self, mode, inputs):
            lengths = inputs.seq_lens + inputs.tokens_per_request
            return SimpleNamespace(lengths=lengths, mask=inputs.custom_mask)

    case, attention, seen = draft_case(3, topk, 4), Spy(), []

    def forward(inputs):
        seen.append(inputs)
        return case.model(inputs)

    runner = case.runner(forward, attention=attention, capture=False)
    batch = case.batch(2)
    runner.fall_back(batch)
    assert attention.max_tokens == 4 * topk
    for step, inputs in enumerate(seen):
        keys = step + 1 if topk == 1 else topk * 3
        assert inputs.attention.lengths.tolist() == (batch.seq_lens + keys).tolist()
        assert inputs.attention.mask is inputs.custom_mask
        assert inputs.seq_lens.tolist() == batch.seq_lens.tolist()
    runner.capture()
    case.check(runner.replay(batch), batch)


@pytest.mark.parametrize("output", [ForwardOutput, DraftExtendOutput])
def test_a_forward_may_return_either_output(draft_case, output):
    case = draft_case(3, 2, 6)
    runner = case.runner(lambda inputs: output(**case.model(inputs).tensors()))
    batch = case.batch(3)
    case.check(runner.replay(batch), batch)


def test_slots_are_declared_once_per_branch(draft_case):
    buffers = draft_case(3, 2, 6).runner(capture=False).buffers
    field = next(layout for layout in buffers.layouts if layout.name == "out_cache_loc")
    assert (field.field.axis, field.row, field.capacity) == (Axis.TOKEN, (3,), 8)
    assert buffers.view(3).out_cache_loc.shape == (18,)
    assert isinstance(buffers.view(1), DraftInputs)
