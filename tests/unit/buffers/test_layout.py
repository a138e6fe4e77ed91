"""Where fields lie in a mailbox entry, for any set of them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, strategies as st

from graphkit import BufferSizes, SpecConfig
from graphkit.buffers import (
    Axis,
    Capacity,
    Field,
    Pad,
    TargetVerifyInputs,
    resolve,
    runner_capacity,
)
from graphkit.buffers.layout import MODEL_DTYPE, entry_bytes, fields_of, header_bytes

LETTERS = {"W": 3, "K": 2, "S": 4, "H": 16, "D": 48, "M": 5}
DTYPES = (torch.bool, torch.int16, torch.int32, torch.int64, torch.bfloat16, MODEL_DTYPE)

a_field = st.builds(
    Field,
    name=st.just("f"),
    axis=st.sampled_from(Axis),
    dtype=st.sampled_from(DTYPES),
    pad=st.sampled_from([0, 1, Pad.SEQ_LEN, Pad.WIDTH]),
    row=st.lists(st.one_of(st.integers(1, 9), st.sampled_from("WKSHD")), max_size=3).map(tuple),
    lead=st.sampled_from([0, 0, 1, 3]),
    flat=st.booleans(),
    optional=st.booleans(),
    by_address=st.booleans(),
    meaning=st.just("any"),
)
some_fields = st.lists(a_field, min_size=1, max_size=8).map(
    lambda fields: [dataclasses.replace(f, name=f"f{i}") for i, f in enumerate(fields)]
)
a_capacity = st.builds(
    Capacity,
    requests=st.integers(1, 300),
    tokens_per_request=st.integers(1, 9),
    letters=st.just(LETTERS),
    model_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seq_len_fill=st.integers(1, 9),
    ragged=st.booleans(),
)


def number_of(n):
    return LETTERS[n] if isinstance(n, str) else n


@given(some_fields, a_capacity)
def test_payloads_meet_neither_each_other_nor_the_header(fields, capacity):
    layouts = resolve(fields, capacity)
    spans = [(0, header_bytes(layouts))]
    spans += [(x.payload, x.payload + x.total_bytes) for x in layouts if not x.field.by_address]
    for (_, end), (begin, _) in pairwise(spans):
        assert end <= begin
    assert spans[-1][1] <= entry_bytes(layouts)
    assert entry_bytes(layouts) - spans[-1][1] < 128


@given(some_fields, a_capacity)
def test_payloads_and_entries_are_aligned(fields, capacity):
    layouts = resolve(fields, capacity)
    assert entry_bytes(layouts) % 128 == 0
    for layout in layouts:
        assert layout.payload % 128 == 0
        assert (layout.payload == 0) == layout.field.by_address


@given(some_fields, a_capacity)
def test_segments_number_the_sources(fields, capacity):
    layouts = resolve(fields, capacity)
    segments = [s for x in layouts for s in range(x.first_segment, x.first_segment + x.segments)]
    assert segments == list(range(sum(max(f.lead, 1) for f in fields)))
    assert header_bytes(layouts) == (4 + len(segments)) * 8


@given(some_fields, a_capacity)
def test_a_layout_knows_its_rows(fields, capacity):
    for field, layout in zip(fields, resolve(fields, capacity), strict=True):
        rows = {
            Axis.REQUEST: capacity.requests,
            Axis.TOKEN: capacity.requests * capacity.tokens_per_request,
            Axis.NONE: 1,
        }[field.axis]
        assert layout.name == field.name
        assert layout.capacity == rows
        assert layout.dtype is (capacity.model_dtype if field.dtype == MODEL_DTYPE else field.dtype)
        assert layout.row == tuple(number_of(n) for n in field.row)
        each = prod(layout.row) if field.flat else 1
        shape = (*[field.lead] * bool(field.lead), rows * each, *layout.row[field.flat * 9 :])
        assert layout.shape(rows) == shape
        assert shape[layout.dim] == rows * each
        some = rows // 2
        assert layout.head(torch.empty(shape), some).shape == layout.shape(some)
        assert layout.total_bytes == torch.Size(shape).numel() * layout.dtype.itemsize
        assert layout.segment_bytes * max(field.lead, 1) == layout.total_bytes
        assert layout.row_bytes * rows == layout.segment_bytes


@given(a_field, a_capacity)
def test_pads_that_only_the_runner_knows(field, capacity):
    width = 1 if capacity.ragged else capacity.tokens_per_request
    known = {Pad.SEQ_LEN: capacity.seq_len_fill, Pad.WIDTH: width}
    (layout,) = resolve([field], capacity)
    assert layout.pad == known.get(field.pad, field.pad)


@given(a_capacity, st.integers(0, 300))
def test_rows_of_an_axis(capacity, requests):
    width = capacity.tokens_per_request
    assert capacity.rows(Axis.REQUEST, requests) == requests
    assert capacity.rows(Axis.TOKEN, requests) == requests * width
    assert capacity.rows(Axis.NONE, requests) == 1


@pytest.mark.parametrize(("fed", "letter"), [(None, 64), (192, 192)])
def test_what_the_settings_say_of_the_letters(fed, letter):
    spec = SpecConfig("EAGLE", 3, 2, 6)
    sizes = BufferSizes(8, 128, 64, 1000, torch.bfloat16, spec_hidden_size=fed)
    capacity = runner_capacity(spec, sizes, requests=12, tokens_per_request=6, seq_len_fill=3)
    letters = {"W": 6, "K": 2, "S": 3, "H": 64, "D": letter, "M": 32}
    assert capacity.letters == letters
    assert (capacity.requests, capacity.tokens_per_request) == (12, 6)
    assert (capacity.model_dtype, capacity.seq_len_fill) == (torch.bfloat16, 3)


def test_a_verify_entry_by_hand(make_capacity):
    """11 segments; five small fields of 128 bytes or less, then mask and mrope positions."""
    layouts = resolve(fields_of(TargetVerifyInputs), make_capacity())
    payloads = {x.name: (x.first_segment, x.payload, x.total_bytes) for x in layouts}
    assert payloads == {
        "req_pool_indices": (0, 128, 32),
        "seq_lens": (1, 256, 16),
        "input_ids": (2, 384, 128),
        "positions": (3, 512, 128),
        "out_cache_loc": (4, 640, 128),
        "custom_mask": (5, 768, 64),
        "input_embeds": (6, 0, 512),
        "mrope_positions": (7, 896, 384),
        "token_bitmask": (10, 0, 128),
    }
    assert header_bytes(layouts) == 15 * 8
    assert entry_bytes(layouts) == 1280


def test_a_runner_without_payload_still_has_a_header(make_capacity):
    (field,) = [f for f in fields_of(TargetVerifyInputs) if f.name == "input_embeds"]
    layouts = resolve([field], make_capacity())
    assert entry_bytes(layouts) == 128
