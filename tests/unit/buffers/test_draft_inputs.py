"""Inputs of the draft modes: what is declared, and what a refresh leaves behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.buffers import (
    Axis,
    DraftExtendInputs,
    DraftInputs,
    InputBuffers,
    MultiLayerDraftExtendInputs,
)

CPU = torch.device("cpu")
I64, I32, F32 = torch.int64, torch.int32, torch.float32
FILL, POISON = 7, 77
DRAFT = {
    "req_pool_indices": (I64, (3,), 0),
    "seq_lens": (I32, (3,), FILL),
    "positions": (I64, (6,), 0),
    "out_cache_loc": (I64, (18,), 0),
    "topk_p": (F32, (3, 2), 0),
    "topk_index": (I64, (3, 2), 0),
    "hidden_states": (F32, (3, 8), 0),
    "mrope_positions": (I64, (3, 6), 0),
}
EXTEND = {
    "req_pool_indices": (I64, (3,), 0),
    "seq_lens": (I32, (3,), FILL),
    "input_ids": (I64, (12,), 0),
    "positions": (I64, (12,), 0),
    "out_cache_loc": (I64, (12,), 0),
    "extend_seq_lens": (I32, (3,), 4),
    "num_accepted_drafts": (I32, (3,), 0),
    "num_accepted_tokens": (I32, (3,), 1),
    "hidden_states": (F32, (12, 24), 0),
    "mrope_positions": (I64, (3, 12), 0),
}
MULTI = EXTEND | {"select_index": (I64, (3,), 0), "temperatures": (F32, (3,), 1)}
MODES = {
    "draft": (DraftInputs, 2, False, DRAFT),
    "v1": (DraftExtendInputs, 4, True, EXTEND | {"extend_seq_lens": (I32, (3,), 1)}),
    "v2": (DraftExtendInputs, 4, False, EXTEND),
    "multi": (MultiLayerDraftExtendInputs, 4, False, MULTI),
}
OPTIONAL = ("mrope_positions", "temperatures")


@pytest.fixture(scope="session")
def make_mode(make_capacity):
    """``make_mode(mode, **options)``: its buffers for 4 requests, optional fields included."""

    def make(mode, **options):
        inputs_type, width, ragged, table = MODES[mode]
        capacity = dataclasses.replace(make_capacity(4, width, fill=FILL), ragged=ragged)
        optional = [name for name in OPTIONAL if name in table]
        settings = {"inputs_type": inputs_type, "optional_fields": optional}
        return InputBuffers(capacity, CPU, **settings | options)

    return make


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def test_fields_shapes_and_pads(make_mode, mode):
    view = make_mode(mode).view(3)
    expected = MODES[mode][3]
    assert {name for name, rows in vars(view).items() if rows is not None} == set(expected)
    for name, (dtype, shape, pad) in expected.items():
        rows = getattr(view, name)
        assert (rows.dtype, tuple(rows.shape)) == (dtype, shape), name
        assert rows.eq(pad).all(), f"{name} starts as something else than its pad"


def test_optional_fields_and_those_of_large_rows(make_mode, mode):
    buffers = make_mode(mode, optional_fields=[])
    present = MODES[mode][3].keys() - OPTIONAL
    assert {layout.name for layout in buffers.layouts} == present
    assert set(buffers.checks.absent) == MODES[mode][3].keys() - present
    assert [x.name for x in buffers.layouts if x.field.by_address] == ["hidden_states"]
    assert make_mode(mode, without=["hidden_states"]).view(2).hidden_states is None


def refreshed(buffers, requests, tokens, padded):
    """Poisons the arena, then refreshes; gives what was written, by field."""
    for tensor in buffers.arena.tensors.values():
        tensor.fill_(POISON)
    entry, written, kept = buffers.mailbox.claim(), {}, []
    writer = buffers.writer(entry, requests, tokens)
    for number, (name, field) in enumerate(writer.fields.items()):
        count = int(np.prod(field.shape))
        written[name] = (torch.arange(count) + number).view(field.shape).to(field.dtype)
        kept.append(field.write(written[name]))
    buffers.mailbox.post(entry, requests, tokens)
    buffers.prepare(padded)
    buffers.refresh(padded)
    buffers.mailbox.commit(kept)
    return written


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_a_refresh_writes_rows_then_pads_and_touches_nothing_behind(make_mode, data):
    """Also where fewer tokens than the bucket come with all its requests."""
    mode = data.draw(st.sampled_from(list(MODES)))
    padded = data.draw(st.integers(1, 4))
    requests = data.draw(st.integers(1, padded))
    _, width, ragged, table = MODES[mode]
    tokens = data.draw(st.integers(requests, requests * width)) if ragged else requests * width
    buffers = make_mode(mode)
    written = refreshed(buffers, requests, tokens, padded)
    for layout in buffers.layouts:
        per_token = layout.field.axis is Axis.TOKEN
        whole = layout.shape(padded * width if per_token else padded)[layout.dim]
        rows = buffers.arena.tensors[layout.name].movedim(layout.dim, 0)
        given_rows = written[layout.name].movedim(layout.dim, 0)
        live = len(given_rows)
        assert torch.equal(rows[:live], given_rows), layout.name
        assert rows[live:whole].eq(table[layout.name][2]).all(), layout.name
        assert rows[whole:].eq(POISON).all(), layout.name
        assert live == layout.shape(tokens if per_token else requests)[layout.dim]


def test_pads_of_the_two_counts_agree(make_mode, mode):
    if mode != "draft":
        buffers = make_mode(mode)
        refreshed(buffers, 1, 4, 4)
        view = buffers.view(4)
        assert torch.equal(view.num_accepted_drafts[1:] + 1, view.num_accepted_tokens[1:])
        assert torch.equal(view.num_accepted_tokens[1:] >= 1, torch.ones(3, dtype=torch.bool))


def test_a_batch_of_draft_says_its_size():
    batch = DraftInputs(
        req_pool_indices=np.ones(3), positions=np.ones(6), out_cache_loc=np.ones(6 * 4)
    )
    assert (batch.batch_size, batch.num_tokens, batch.tokens_per_request) == (3, 6, 2)


def test_slots_of_all_steps_are_no_rows(make_mode):
    """B * K * S of them: with positions bound, nothing else per token is left to count."""
    buffers = make_mode("draft", bound_fields={"positions": torch.zeros(8, dtype=I64)})
    batch = DraftInputs(req_pool_indices=np.ones(3), out_cache_loc=np.ones(18))
    assert buffers.checks.count_tokens(batch) == 6


def test_with_all_rows_bound_a_draft_batch_has_the_captured_ones(make_mode):
    storage = {"positions": torch.zeros(8, dtype=I64), "out_cache_loc": torch.zeros(24, dtype=I64)}
    buffers = make_mode("draft", bound_fields=storage)
    assert buffers.checks.count_tokens(DraftInputs(req_pool_indices=np.ones(3))) == 6


counts = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(counts)
def test_last_rows_of_packed_requests(counts):
    batch = DraftExtendInputs(
        num_accepted_tokens=torch.tensor(counts, dtype=I32),
        input_ids=torch.zeros(20),
        req_pool_indices=torch.zeros(len(counts)),
        width=4,
    )
    rows = [request for request, count in enumerate(counts) for _ in range(count)]
    last = [max(row for row, owner in enumerate(rows) if owner == r) for r in range(len(counts))]
    assert batch.last_rows().tolist() == last
    assert batch.last_rows().dtype is I64


@given(counts, st.integers(4, 6))
def test_last_rows_at_a_uniform_stride(counts, width):
    batch = DraftExtendInputs(
        num_accepted_tokens=torch.tensor(counts, dtype=I32),
        input_ids=torch.zeros(len(counts) * width),
        req_pool_indices=torch.zeros(len(counts)),
    )
    expected = [i * width + count - 1 for i, count in enumerate(counts)]
    assert batch.last_rows().tolist() == expected
