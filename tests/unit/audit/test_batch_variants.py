"""Tests of variants of a batch, in every mode."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import graphkit as gk
from declared_modes import MODES, every_mode
from graphkit.audit.batch_variants import Requests, fill_floats, is_content
from graphkit.buffers import Axis, declare, fields_of
from graphkit.runners import RUNNERS
from graphkit.runners.sample_batch import largest_number
from graphkit.testing import batches

VERIFY, EXTEND = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DRAFT_EXTEND
DRAFT, LAYERS = gk.ForwardMode.DRAFT, gk.ForwardMode.MULTI_LAYER_EAGLE
SIZES = gk.BufferSizes(4, 32, 8, 50, torch.float32, draft_vocab_size=20)
FEW = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
both = pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])


def spec_of(topk):
    return gk.SpecConfig("EAGLE", 3, topk, 4 if topk == 1 else 8)


def buffers_and_batches(mode, topk, **options):
    """Return the buffers of a mode, and a strategy for its batches."""
    forward = [print] * 3 if mode is LAYERS else print
    spec = spec_of(topk)
    runner = RUNNERS[mode](forward, spec=spec, sizes=SIZES, device="cpu", **options)
    return runner.buffers, batches(mode, spec, SIZES, **options)


def requests_of(batch, buffers):
    return Requests.from_batch(batch, buffers.layouts, buffers.capacity)


def refreshed(buffers, batch, size):
    """Return every field as a forward sees it after a refresh at a captured size."""
    buffers.prepare(size)
    with buffers.posted(batch):
        buffers.refresh(size)
    view = buffers.view(size)
    return {layout.name: getattr(view, layout.name).clone() for layout in buffers.layouts}


def fields(batch):
    return {
        field.name: torch.as_tensor(getattr(batch, field.name))
        for field in fields_of(type(batch))
        if getattr(batch, field.name) is not None
    }


def assert_same(rows, expected):
    for name, wanted in expected.items():
        assert torch.equal(rows[name], wanted), name


def on_drawn_batches(mode, topk, **options):
    """Call the decorated ``check(batch, buffers)`` with drawn batches of a mode."""
    buffers, drawn = buffers_and_batches(mode, topk, **options)

    def run(check):
        @FEW
        @given(drawn)
        def check_each(batch):
            check(batch, buffers)

        check_each()

    return run


@both
@every_mode
def test_the_requests_of_a_batch_make_the_same_batch(mode, topk):
    @on_drawn_batches(mode, topk)
    def check(batch, buffers):
        again = fields(requests_of(batch, buffers).batch())
        assert_same(again, fields(batch))
        assert {name: rows.dtype for name, rows in again.items()} == {
            layout.name: layout.dtype for layout in buffers.layouts
        }


@both
@every_mode
def test_padding_a_batch_equals_a_refresh(mode, topk):
    @on_drawn_batches(mode, topk)
    def check(batch, buffers):
        expected = refreshed(buffers, batch, 4)
        padded = refreshed(buffers, requests_of(batch, buffers).padded(4), 4)
        if "select_index" in expected:  # as a live request, a pad must select a row of its own
            first_rows = torch.arange(4) * buffers.capacity.tokens_per_request
            expected["select_index"] = expected["select_index"].clamp(min=first_rows)
        assert_same(padded, expected)


@both
@every_mode
def test_requests_keep_their_rows_in_any_order(mode, topk):
    @on_drawn_batches(mode, topk)
    def check(batch, buffers):
        whole = requests_of(batch, buffers)
        backwards = list(reversed(range(len(whole))))
        turned = requests_of(whole.take(backwards).batch(), buffers)
        for i, j in enumerate(backwards):
            mine, theirs = whole.take([i]).batch(), turned.take([j]).batch()
            assert_same(fields(theirs), fields(mine))
        assert_same(fields(turned.take(backwards).batch()), fields(batch))


@every_mode
def test_only_content_is_filled(mode):
    @on_drawn_batches(mode, 2)
    def check(batch, buffers):
        whole = requests_of(batch, buffers)
        before, after = whole.rows, whole.filled(fill_floats(float("nan"))).rows
        for layout in buffers.layouts:
            same = torch.equal(before[layout.name], after[layout.name])
            if not is_content(layout) or layout.dtype is torch.int64:
                assert same, layout.name
            elif layout.dtype is torch.bool:
                assert not after[layout.name].any()
            else:
                assert after[layout.name].isnan().all()
        ones = whole.filled(lambda layout, _rows: 1).rows
        changed = {layout.name for layout in buffers.layouts if (ones[layout.name] == 1).all()} - {
            "num_accepted_tokens",
            "seq_lens",
            "extend_seq_lens",
            "req_pool_indices",
        }
        assert changed >= {layout.name for layout in buffers.layouts if is_content(layout)}


def test_content_fields():
    names = {}
    for mode in MODES:
        buffers, _ = buffers_and_batches(mode, 2)
        for layout in buffers.layouts:
            names.setdefault(is_content(layout), set()).add(layout.name)
    assert names[False] == {
        "req_pool_indices", "seq_lens", "out_cache_loc", "extend_seq_lens", "num_accepted_drafts",
        "num_accepted_tokens", "select_index",
    }  # fmt: skip
    assert names[True] == {
        "input_ids", "positions", "custom_mask", "topk_p", "topk_index", "hidden_states",
    }  # fmt: skip


def test_the_largest_numbers():
    buffers, _ = buffers_and_batches(VERIFY, 1, optional_fields=["mrope_positions"])
    largest = {layout.name: largest_number(layout, SIZES) for layout in buffers.layouts}
    assert largest == {
        "req_pool_indices": None, "seq_lens": None, "input_ids": 19, "positions": 31,
        "out_cache_loc": None, "mrope_positions": 31,
    }  # fmt: skip
    whole = dataclasses.replace(SIZES, draft_vocab_size=None)
    layout = next(layout for layout in buffers.layouts if layout.name == "input_ids")
    assert largest_number(layout, whole) == 49


def test_a_field_in_three_segments_and_one_without_rows():
    """[3, T] is reordered with its rows, a field of the whole batch is kept."""
    inputs_type = dataclasses.make_dataclass(
        "Own",
        [("sharpness", object, declare(Axis.NONE, torch.float32, "of the batch", row=(2,)))],
        bases=(gk.TargetVerifyInputs,), kw_only=True, eq=False,
    )  # fmt: skip

    @on_drawn_batches(VERIFY, 1, optional_fields=["mrope_positions"], inputs_type=inputs_type)
    def check(batch, buffers):
        whole = requests_of(batch, buffers)
        order = list(reversed(range(len(whole))))
        turned = whole.take(order).batch()
        assert turned.mrope_positions.shape == (3, batch.num_tokens)
        assert (turned.mrope_positions == turned.positions).all()
        assert np.array_equal(turned.sharpness, batch.sharpness)
        assert np.array_equal(whole.padded(4).sharpness, batch.sharpness)
