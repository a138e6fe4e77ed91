"""The cases of ``test_refresh.py`` on the Triton kernels; ``../ops/test_interpreted.py`` runs this.

CPU addresses are device addresses in the interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.buffers import Axis, input_buffers
from graphkit.ops.kernels import refresh as kernels
from graphkit.ops.refresh import CHUNK_BYTES
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/unit/ops/test_interpreted.py instead"

SOURCES = ["payload", "address", "on_device", "bound"]


@pytest.fixture(autouse=True, scope="module")
def through_the_kernels():
    """Every refresh of these buffers launches the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_buffers, "refresh", launch)
        yield


def launch(*args):
    op = OPS["refresh"]
    op.launch(op.arguments(*args))


@pytest.fixture
def widths(monkeypatch):
    """The words that programs copied by, in bytes."""
    seen, plain = [], kernels._copy

    def spy(*args):
        seen.append(int(args[8]))
        plain(*args)

    monkeypatch.setattr(kernels, "_copy", spy)
    return seen


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("dtype", "row", "lead"),
    [
        (torch.int64, (2,), 0),  # 16-byte rows
        (torch.int64, (), 3),
        (torch.int32, (), 0),
        (torch.int16, (), 3),
        (torch.bfloat16, (3,), 0),
        (torch.bool, (3, 3), 0),  # odd byte counts
        (torch.uint8, (), 3),
    ],
)
def test_every_width_of_copy(make_case, make_part, source, dtype, row, lead):
    pad = True if dtype is torch.bool else 77
    parts = [make_part(axis, dtype, row, lead, pad, source) for axis in Axis]
    case = make_case(parts, requests=4, width=3)
    for live, padded in [(0, 4), (3, 4)]:  # other tests have no pads
        case.turn(live, padded)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("source", ["address", "on_device"])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_source_off_its_alignment(make_case, make_part, dtype, source, offset):
    part = make_part(Axis.REQUEST, dtype, (16,), pad=6, source=source, offset=offset)
    case = make_case([part], requests=4, width=1)
    for live, padded in [(4, 4), (1, 3)]:
        case.turn(live, padded)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("dtype", "columns", "offset"),
    [(torch.float32, 1024, 0), (torch.float32, 1030, 1), (torch.uint8, 2777, 0)],
)
def test_a_field_larger_than_a_chunk(make_case, make_part, source, dtype, columns, offset):
    part = make_part(Axis.TOKEN, dtype, (columns,), pad=3, source=source, offset=offset)
    assert columns * dtype.itemsize * 6 > 2 * CHUNK_BYTES
    case = make_case([part], requests=3, width=2)
    for live, padded in [(0, 3), (1, 3), (3, 3), (1, 2)]:
        case.turn(live, padded)


@pytest.mark.parametrize(
    ("dtype", "columns", "offset", "word"),
    [
        (torch.int64, 2, 0, 8),
        (torch.int64, 1, 0, 4),
        (torch.int32, 1, 0, 4),
        (torch.int16, 1, 0, 1),
        (torch.int64, 2, 1, 4),
        (torch.int32, 4, 1, 4),
        (torch.int16, 8, 1, 1),
        (torch.uint8, 16, 1, 1),
        (torch.uint8, 16, 4, 4),
    ],
)
def test_the_width_that_all_addresses_allow(
    make_case, make_part, widths, dtype, columns, offset, word
):
    part = make_part(Axis.REQUEST, dtype, (columns,), source="address", offset=offset)
    case = make_case([part], requests=3, width=1)
    case.turn(3, 3)
    assert set(widths) == {word}


@pytest.mark.parametrize("other", [-1, 4])
def test_an_entry_out_of_turn_is_a_fault(make_case, make_part, other):
    case = make_case([make_part(Axis.REQUEST, torch.int32)], requests=2, width=1)
    case.turn(1, 2)
    buffers, mailbox = case.buffers, case.buffers.mailbox
    mailbox.post(mailbox.claim(), 1, 1)
    mailbox.words(1)[0] += other
    buffers.refresh(2)
    assert mailbox.ring[:2].tolist() == [2, 2]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_fields_any_sizes(make_case, make_part, data):
    dtypes = st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.bfloat16, torch.int64])
    field = st.builds(
        make_part,
        axis=st.sampled_from(Axis),
        dtype=dtypes,
        row=st.lists(st.integers(1, 5), max_size=2).map(tuple),
        lead=st.sampled_from([0, 2]),
        pad=st.integers(0, 100),
        source=st.sampled_from(SOURCES),
        offset=st.integers(0, 3),
    )
    fields = data.draw(st.lists(field, min_size=1, max_size=4))
    case = make_case(fields, requests=4, width=data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 5))):
        padded = data.draw(st.integers(1, 4))
        case.turn(data.draw(st.integers(0, padded)), padded)
