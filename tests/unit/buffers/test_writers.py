"""Batches on their way into an entry: what is written, what travels by address, what is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from graphkit.buffers import FieldWriter
from graphkit.errors import InputError
from graphkit.ops.refresh import Header

CPU = torch.device("cpu")


def test_host_rows_too_large_for_the_entry_travel_by_address(make_buffers, pass_on, make_batch):
    buffers = make_buffers(optional_fields=["input_embeds"])
    rows = torch.randn(8, 8)
    view = pass_on(buffers, make_batch(2, input_embeds=rows.double().numpy()), 3)
    assert torch.equal(view.input_embeds[:8], rows)
    assert view.input_embeds[8:].eq(0).all()
    (layout,) = [x for x in buffers.layouts if x.name == "input_embeds"]
    address = buffers.mailbox.words(0)[Header.SOURCES + layout.first_segment]
    assert list((ctypes.c_float * 64).from_address(address)) == rows.view(-1).tolist()


@pytest.mark.parametrize(
    "rows",
    [
        np.arange(5, 9),
        torch.arange(5, 9),
        np.arange(5, 9, dtype=np.uint8),
        torch.arange(5, 9).int(),
    ],
)
def test_host_rows_take_the_place_of_an_address(make_buffers, make_batch, rows):
    """A staged field may be assigned twice, the first time from the device."""
    buffers = make_buffers()
    entry = buffers.mailbox.claim()
    kept = buffers.writer(entry, 1).write(make_batch(1))
    (layout,) = [x for x in buffers.layouts if x.name == "positions"]
    elsewhere = torch.full((4,), 77)
    buffers.mailbox.point(entry, Header.SOURCES + layout.first_segment, elsewhere.data_ptr())
    FieldWriter(buffers.mailbox, entry, layout, 4, CPU).write(rows)
    buffers.mailbox.post(entry, 1, 4)
    buffers.mailbox.commit([*kept, elsewhere])
    buffers.prepare(1)
    buffers.refresh(1)
    assert buffers.view(1).positions.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("positions", torch.ones(4, device="meta").long()),
        ("input_embeds", torch.ones(4, 8, device="meta")),
        ("positions", torch.ones(4).long().to_sparse()),
        ("input_embeds", torch.ones(4, 8).to_sparse()),
    ],
    ids=["meta", "meta by address", "sparse", "sparse by address"],
)
def test_a_tensor_without_rows_in_memory_is_refused(make_buffers, pass_on, make_batch, name, value):
    buffers = make_buffers(optional_fields=["input_embeds"])
    batch = make_batch(1, **{"input_embeds": np.ones((4, 8)), name: value})
    with pytest.raises(InputError, match=f"'{name}'"):
        pass_on(buffers, batch, 1)


def test_a_refused_batch_leaves_the_ring_in_turn(make_buffers, pass_on, make_batch):
    buffers = make_buffers()
    with pytest.raises(InputError, match="out_cache_loc"):
        pass_on(buffers, make_batch(2, first=50, out_cache_loc=np.ones(3)), 2)
    assert pass_on(buffers, make_batch(1), 2).input_ids.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert buffers.mailbox.ring[:2].tolist() == [1, 0]
