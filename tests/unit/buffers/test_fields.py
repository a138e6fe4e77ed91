"""What TARGET_VERIFY's inputs declare, and inputs that a user declares further."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit.buffers import (
    Axis,
    InputBuffers,
    Inputs,
    Pad,
    TargetVerifyInputs,
    declare,
    fields_of,
)
from graphkit.buffers.layout import MODEL_DTYPE
from graphkit.errors import ConfigError

TABLE = {
    "req_pool_indices": (Axis.REQUEST, torch.int64, 0, (), 0, False),
    "seq_lens": (Axis.REQUEST, torch.int32, Pad.SEQ_LEN, (), 0, False),
    "input_ids": (Axis.TOKEN, torch.int64, 0, (), 0, False),
    "positions": (Axis.TOKEN, torch.int64, 0, (), 0, False),
    "out_cache_loc": (Axis.TOKEN, torch.int64, 0, (), 0, False),
    "custom_mask": (Axis.REQUEST, torch.bool, True, ("W", "W"), 0, True),
    "input_embeds": (Axis.TOKEN, MODEL_DTYPE, 0, ("H",), 0, True),
    "mrope_positions": (Axis.TOKEN, torch.int64, 0, (), 3, True),
    "token_bitmask": (Axis.TOKEN, torch.int32, -1, ("M",), 0, True),
}
"""Axis, dtype, pad, row, lead and whether it is optional."""

OWN = {
    "temperatures": declare(Axis.REQUEST, torch.float32, "of each request", pad=1),
    "scores": declare(Axis.TOKEN, torch.bfloat16, "of each token", row=("K", 3), pad=-2),
    "step": declare(Axis.NONE, torch.int64, "of the run", pad=5),
    "planes": declare(Axis.REQUEST, torch.int32, "three of them", lead=3, row=(2,), pad=4),
    "hints": declare(Axis.TOKEN, MODEL_DTYPE, "by address", row=("D",), by_address=True),
    "widths": declare(Axis.REQUEST, torch.int32, "rows of each request", pad=Pad.WIDTH),
}
"""Declarations of a user, one of every kind."""
PADS = {"temperatures": 1, "scores": -2, "step": 5, "planes": 4, "hints": 0, "widths": 4}


@pytest.fixture
def own(make_inputs):
    return make_inputs(TargetVerifyInputs, **OWN)


def test_target_verify_declares_the_table():
    declared = {f.name: f for f in fields_of(TargetVerifyInputs)}
    assert list(declared) == list(TABLE)
    for name, facts in TABLE.items():
        f = declared[name]
        assert (f.axis, f.dtype, f.pad, f.row, f.lead, f.optional) == facts, name
        assert isinstance(f.meaning, str)
        assert len(f.meaning.split()) >= 2, f"{name} has no meaning"


def test_wide_fields_travel_by_address():
    wide = [f.name for f in fields_of(TargetVerifyInputs) if f.by_address]
    assert wide == ["input_embeds", "token_bitmask"]


def test_what_every_mode_has_comes_first_and_attention_is_no_field():
    shared = fields_of(Inputs)
    assert shared == fields_of(TargetVerifyInputs)[: len(shared)]
    assert "attention" not in [f.name for f in shared]


@pytest.mark.parametrize("fill", [1, 7])
def test_pads_in_memory(make_capacity, fill):
    """Indices pad to the dummy row and entry; a pad request sees at least one key."""
    optional = ["custom_mask", "input_embeds", "mrope_positions", "token_bitmask"]
    buffers = InputBuffers(
        make_capacity(fill=fill),
        torch.device("cpu"),
        inputs_type=TargetVerifyInputs,
        optional_fields=optional,
    )
    view = buffers.view(4)
    for name in TABLE:
        pad = {"seq_lens": fill, "custom_mask": True, "token_bitmask": -1}.get(name, 0)
        assert getattr(view, name).eq(pad).all(), name


def test_a_view_counts_itself(make_capacity):
    view = InputBuffers(
        make_capacity(5, 3), torch.device("cpu"), inputs_type=TargetVerifyInputs
    ).view(2)
    assert (view.batch_size, view.num_tokens, view.tokens_per_request) == (2, 6, 3)
    assert view.attention is None


def test_an_idle_batch_counts_itself():
    none = np.zeros(0, np.int64)
    idle = TargetVerifyInputs(req_pool_indices=none, input_ids=none)
    assert (idle.batch_size, idle.num_tokens, idle.tokens_per_request) == (0, 0, 0)


def test_inputs_take_keywords_alone():
    with pytest.raises(TypeError):
        TargetVerifyInputs(np.zeros(2, np.int64))


def test_own_fields_come_after_the_modes(own):
    assert [f.name for f in fields_of(own)] == [*TABLE, *OWN]


def test_own_fields_are_allocated(own, make_capacity):
    buffers = InputBuffers(make_capacity(), torch.device("cpu"), inputs_type=own)
    view = buffers.view(2)
    assert type(view) is own
    got = {name: (tuple(getattr(view, name).shape), getattr(view, name).dtype) for name in OWN}
    assert got == {
        "temperatures": ((2,), torch.float32),
        "scores": ((8, 2, 3), torch.bfloat16),
        "step": ((1,), torch.int64),
        "planes": ((3, 2, 2), torch.int32),
        "hints": ((8, 24), torch.float32),
        "widths": ((2,), torch.int32),
    }


def test_own_fields_are_refreshed_and_padded(own, make_capacity):
    buffers = InputBuffers(make_capacity(), torch.device("cpu"), inputs_type=own)
    rows = {
        "temperatures": np.array([0.5], np.float32),
        "scores": torch.randn(4, 2, 3).bfloat16(),
        "step": np.array([9]),
        "planes": np.arange(6, dtype=np.int32).reshape(3, 1, 2),
        "hints": torch.randn(4, 24),
        "widths": np.array([2], np.int32),
    }
    tokens = ("input_ids", "positions", "out_cache_loc")
    shared = {name: np.ones(4, np.int64) for name in tokens}
    shared |= {name: np.ones(1, np.int64) for name in ("req_pool_indices", "seq_lens")}
    entry = buffers.mailbox.claim()
    kept = buffers.writer(entry, 1).write(own(**shared, **rows))
    buffers.mailbox.post(entry, 1, 4)
    buffers.mailbox.commit(kept)
    buffers.prepare(2)
    buffers.refresh(2)
    view = buffers.view(2)
    for name, given in rows.items():
        got, live = getattr(view, name), torch.as_tensor(given)
        dim = 1 if name == "planes" else 0
        head, tail = got.tensor_split([live.shape[dim]], dim)
        assert torch.equal(head, live), name
        assert tail.eq(PADS[name]).all(), name
    assert [getattr(view, name).numel() for name in PADS] == [2, 48, 1, 12, 192, 2]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (declare(Axis.TOKEN, torch.int64, "x", row=("Z",)), "Z"),
        (declare(Axis.TOKEN, "bfloat16", "x"), "bfloat16"),
    ],
    ids=["unknown letter", "unknown dtype"],
)
def test_a_wrong_declaration_is_refused_by_name(make_inputs, make_capacity, wrong, text):
    with pytest.raises(ConfigError, match=rf"mine.*{text}"):
        InputBuffers(
            make_capacity(),
            torch.device("cpu"),
            inputs_type=make_inputs(TargetVerifyInputs, mine=wrong),
        )
