"""Modes and pools of the reference target, and the slots of its sample batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk
from declared_modes import MODES, every_mode
from graphkit.engine.attention import TritonAttention
from graphkit.errors import ConfigError
from graphkit.models.reference import default_checkpoint, reference_target
from graphkit.models.reference.prefilled_requests import CONTEXT
from graphkit.models.reference.target import model_target

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
COUNT, STEPS = 6, 3


def test_select_index_is_the_row_of_the_last_accepted_token(target, sample):
    batch, *_ = sample(LAYERS)
    width = target.spec.num_draft_tokens
    expected = [row * width + n - 1 for row, n in enumerate(batch.num_accepted_tokens)]
    assert batch.select_index.tolist() == expected


@every_mode
def test_slots_are_those_of_the_request_pool(target, sample, mode):
    batch, _, requests = sample(mode)
    spec = target.spec
    table = target.attention[mode].req_to_token_pool.req_to_token
    counts = [spec.topk * STEPS if mode is DRAFT else spec.tokens_per_request(mode)] * COUNT
    if mode is EXTEND:
        counts = batch.num_accepted_tokens.tolist()
    expected = [
        slot
        for row, (_, length), count in zip(batch.req_pool_indices, requests, counts, strict=True)
        for slot in table[row, length : length + count].tolist()
    ]
    assert batch.out_cache_loc.tolist() == expected
    assert 0 not in expected
    assert len(set(expected)) == len(expected)


@every_mode
def test_positions_count_from_the_prefix(target, sample, mode):
    batch, _, requests = sample(mode)
    if mode is EXTEND:
        counts = batch.num_accepted_tokens
        expected = [
            length + i for (_, length), n in zip(requests, counts, strict=True) for i in range(n)
        ]
    else:
        width = target.spec.tokens_per_request(mode)
        step = 0 if mode is DRAFT else 1
        expected = [length + i * step for _, length in requests for i in range(width)]
    is_tree = mode is VERIFY and target.spec.topk > 1
    if is_tree:  # a node's depth: as many as it sees, itself not counted
        depth = batch.custom_mask.sum(2) - 1
        expected = (np.array([length for _, length in requests])[:, None] + depth).ravel().tolist()
    assert batch.positions.tolist() == expected


@every_mode
def test_a_batch_is_the_same_for_the_same_arguments(target, mode):
    def rows(batch_size, seed):
        batch = target.batch(mode, batch_size, seed)
        return {name: np.asarray(r).tolist() for name, r in vars(batch).items() if r is not None}

    assert rows(3, 5) == rows(3, 5)
    assert rows(COUNT, 5) != rows(COUNT, 6)


@every_mode
def test_host_fields_are_numpy_and_fit_without_a_cast(target, mode):
    runner = target.runner(mode, device="cpu", batch_sizes=[COUNT])
    batch = target.batch(mode, COUNT, 1)
    for layout in runner.buffers.layouts:
        rows = getattr(batch, layout.name)
        assert isinstance(rows, torch.Tensor if layout.field.by_address else np.ndarray)
        assert torch.as_tensor(rows).dtype is layout.dtype, layout.name


def test_every_number_of_accepted_tokens_occurs(target):
    seen = {
        int(n)
        for seed in range(8)
        for mode in (EXTEND, EXTEND_V2, LAYERS)
        for n in target.batch(mode, COUNT, seed).num_accepted_tokens
    }
    assert seen == set(range(1, STEPS + 2))


@pytest.mark.parametrize("topk", [1, 2, 5])
def test_the_longest_prefix_leaves_room_for_drafts(models, topk):
    target = model_target(*models, name="tiny", topk=topk, max_batch_size=64)
    spec, lengths = target.spec, target.sample_batch.requests.lengths
    assert lengths.max() + max(spec.num_draft_tokens, topk * STEPS) <= CONTEXT
    assert lengths.max() > CONTEXT / 2 > lengths.min()


def test_a_topk_that_leaves_no_room_is_refused(models):
    with pytest.raises(ConfigError, match="the sample requests have room for 119") as caught:
        model_target(*models, name="tiny", topk=50)
    assert caught.value.field == "topk"


def test_parts_have_pools_of_their_own(target):
    parts = {name.split(".")[0] for name in target.mutable_state}
    assert parts == {"target", "draft", "mtp"} == {name.split(".")[0] for name in target.weights}
    assert {f"mtp.key.{layer}" for layer in range(STEPS)} < target.mutable_state.keys()
    assert len({tensor.data_ptr() for tensor in target.mutable_state.values()}) == len(
        target.mutable_state
    )
    backends = {id(backend) for backend in target.attention.values()}
    assert len(backends) == 3
    assert target.attention[DRAFT] is target.attention[EXTEND] is target.attention[EXTEND_V2]


def test_a_model_without_draft_models_has_fewer_modes(models):
    model, eagle, mtp = models
    assert set(model_target(model, name="tiny").forwards) == {VERIFY, DECODE}
    with_head = model_target(model, eagle, name="tiny")
    assert set(with_head.forwards) == {VERIFY, DECODE, DRAFT, EXTEND, EXTEND_V2}
    assert set(model_target(model, mtp=mtp, name="tiny").forwards) == {VERIFY, DECODE, LAYERS}


def test_the_shipped_target_has_every_mode():
    target = reference_target()
    assert set(target.forwards) == set(MODES)
    assert (target.name, list(target.batch_sizes)) == ("reference model", [1, 2, 4, 8])
    wide = reference_target(topk=2, max_batch_size=3, attention=TritonAttention)
    assert (wide.spec.topk, wide.spec.num_draft_tokens) == (2, 8)
    assert (wide.sizes.max_batch_size, wide.batch_sizes) == (3, None)
    assert {type(backend) for backend in wide.attention.values()} == {TritonAttention}


def test_another_checkpoint_has_no_draft_models():
    target = reference_target(checkpoint=default_checkpoint())
    assert set(target.forwards) == {VERIFY, DECODE}
    assert target.name == "reference target"
