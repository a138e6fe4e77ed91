"""The refresh op in torch, against plain loops over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.buffers import Axis
from graphkit.ops.refresh import CHUNK_BYTES, KEEP, RING_WORDS, refresh

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
ENTRIES, WORDS = 4, 32
PAYLOAD = 10 * 8
"""First byte of the hand-made payload in an entry of WORDS words."""


@st.composite
def parts(draw, make_part):
    dtype = draw(st.sampled_from(DTYPES))
    return make_part(
        axis=draw(st.sampled_from(Axis)),
        dtype=dtype,
        row=tuple(draw(st.lists(st.integers(1, 5), max_size=2))),
        lead=draw(st.sampled_from([0, 0, 2, 3])),
        pad=draw(st.booleans()) if dtype is torch.bool else draw(st.integers(0, 100)),
        source=draw(st.sampled_from(["payload", "payload", "address", "on_device", "bound"])),
        offset=draw(st.integers(0, 3)),
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_fields_any_sizes(make_case, make_part, data):
    fields = data.draw(st.lists(parts(make_part), min_size=1, max_size=6))
    requests, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    case = make_case(fields, requests=requests, width=width)
    for _ in range(data.draw(st.integers(1, 6))):
        padded = data.draw(st.integers(1, requests))
        case.turn(data.draw(st.integers(0, padded)), padded)


def test_a_field_larger_than_a_chunk(make_case, make_part):
    for source in ("payload", "address", "on_device", "bound"):
        part = make_part(Axis.TOKEN, torch.int16, (700,), pad=3, source=source)
        assert CHUNK_BYTES < 700 * 2 * 3
        case = make_case([part], requests=3, width=3)
        case.turn(1, 3)
        case.turn(3, 3)


def by_hand(sequence=0):
    """Arguments for two segments: int32 per request from the entry, int64 per token in place."""
    segments = [torch.full((4,), -7, dtype=torch.int32), torch.full((8,), -7)]
    mailbox = torch.zeros(RING_WORDS + ENTRIES * WORDS, dtype=torch.int64)
    posted = mailbox[RING_WORDS:].view(ENTRIES, WORDS)[sequence % ENTRIES]
    posted[:6] = torch.tensor([sequence, 2, 4, 1, 0, KEEP])
    posted.view(torch.uint8)[PAYLOAD : PAYLOAD + 8].view(torch.int32).copy_(torch.tensor([11, 12]))
    pads = [5 + (5 << 32), 9]
    table = torch.tensor(
        [
            [segments[0].data_ptr(), PAYLOAD, 1, 4, pads[0]],
            [segments[1].data_ptr(), 0, 2, 8, pads[1]],
        ]
    )
    fetches = torch.tensor([[0, 48], [PAYLOAD, 16]], dtype=torch.int32)
    copies = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    state, entry = torch.tensor([sequence]), torch.zeros(WORDS, dtype=torch.int64)
    return [segments, mailbox, state, table, entry, fetches, copies, ENTRIES, 3, 6]


@pytest.mark.parametrize("sequence", [0, 1, 3, 4, 41])
def test_the_layout_that_the_module_documents(sequence):
    args = by_hand(sequence)
    segments, mailbox, state = args[:3]
    untouched = mailbox[RING_WORDS:].clone()
    refresh(*args)
    assert segments[0].tolist() == [11, 12, 5, -7]
    assert segments[1].tolist() == [-7, -7, -7, -7, 9, 9, -7, -7]
    assert state.tolist() == [sequence + 1]
    assert mailbox[:RING_WORDS].tolist() == [sequence + 1, 0, 0, 0, 0, 0, 0, 0]
    assert torch.equal(mailbox[RING_WORDS:], untouched)


@pytest.mark.parametrize("other", [-1, 1, 4])
def test_a_entry_out_of_turn_is_a_fault_and_still_consumed(other):
    args = by_hand(sequence=9)
    mailbox, state = args[1:3]
    mailbox[RING_WORDS:].view(ENTRIES, WORDS)[9 % ENTRIES, 0] = 9 + other
    refresh(*args)
    assert mailbox[:2].tolist() == [10, 10]
    assert state.tolist() == [10]


def test_a_fault_stays_until_somebody_looks():
    args = by_hand(sequence=9)
    mailbox = args[1]
    mailbox[RING_WORDS:].view(ENTRIES, WORDS)[9 % ENTRIES, 0] = 8
    refresh(*args)
    mailbox[RING_WORDS:].view(ENTRIES, WORDS)[10 % ENTRIES, :6] = torch.tensor(
        [10, 0, 0, 1, 0, KEEP]
    )
    refresh(*args)
    assert mailbox[:2].tolist() == [11, 10]


def test_tracers_see_the_mutations():
    args = by_hand()
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.graphkit.refresh.default, args, test_utils=utils)
