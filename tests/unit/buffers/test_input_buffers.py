"""One runner's memory: views at fixed addresses, bound storage, and the way of a batch into it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from graphkit.buffers import (
    Axis,
    TargetVerifyInputs,
    declare,
)
from graphkit.errors import ConfigError

CPU = torch.device("cpu")
NAMES = ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc")
OPTIONAL = ("custom_mask", "input_embeds", "mrope_positions")


def test_views_alias_one_arena_at_fixed_addresses(make_buffers, pass_on, make_batch):
    buffers = make_buffers(optional_fields=OPTIONAL)
    large, small = buffers.view(4), buffers.view(2)
    for name in (*NAMES, *OPTIONAL):
        assert getattr(small, name).data_ptr() == getattr(large, name).data_ptr(), name
        assert getattr(buffers.view(2), name).data_ptr() == getattr(small, name).data_ptr(), name
    more = {"input_embeds": np.ones((8, 8)), "custom_mask": np.zeros((2, 4, 4), bool)}
    pass_on(buffers, make_batch(2, **more, mrope_positions=np.full((3, 8), 6)), 2)
    assert small.input_ids.tolist() == large.input_ids[:8].tolist() == list(range(1, 9))
    assert large.mrope_positions[:, :8].eq(6).all()
    assert large.mrope_positions[:, 8:].eq(0).all()
    assert small.mrope_positions.shape == (3, 8)


def test_fields_do_not_overlap_and_are_aligned(make_buffers):
    buffers = make_buffers(optional_fields=OPTIONAL)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in buffers.arena.tensors.values()
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all((begin - spans[0][0]) % 256 == 0 for begin, _ in spans)
    assert buffers.arena.nbytes == sum(-(-(end - begin) // 256) * 256 for begin, end in spans)


def test_optional_fields_that_nobody_asked_for_are_not_there(make_buffers):
    buffers = make_buffers(optional_fields=["custom_mask"])
    assert buffers.checks.absent == ("input_embeds", "mrope_positions", "token_bitmask")
    view = buffers.view(3)
    assert view.input_embeds is None
    assert view.mrope_positions is None
    assert view.custom_mask.shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        (
            {"optional_fields": ["mask"]},
            "optional_fields",
            "'mask'.*custom_mask, input_embeds, mrope_positions",
        ),
        ({"optional_fields": ["seq_lens"]}, "optional_fields", "'seq_lens'"),
        ({"bound_fields": {"ids": torch.zeros(1)}}, "bound_fields", "'ids'.*input_ids"),
    ],
)
def test_names_that_do_not_exist(make_buffers, options, field, text):
    with pytest.raises(ConfigError, match=text) as caught:
        make_buffers(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "misfit",
    [
        torch.zeros(15, dtype=torch.int64),
        torch.zeros(16, dtype=torch.int32),
        torch.zeros(32, dtype=torch.int64)[::2],
        torch.zeros(16, dtype=torch.int64, device="meta"),
    ],
    ids=["shape", "dtype", "strides", "device"],
)
def test_bound_storage_must_fit(make_buffers, misfit):
    with pytest.raises(ConfigError, match=r"'positions'.*contiguous \(16,\) torch.int64 on cpu"):
        make_buffers(bound_fields={"positions": misfit})


def test_a_bound_field_keeps_its_live_rows_and_gets_a_tail(make_buffers, pass_on, make_batch):
    storage = torch.arange(100, 116)
    buffers = make_buffers(bound_fields={"positions": storage})
    assert buffers.view(2).positions.data_ptr() == storage.data_ptr()
    view = pass_on(buffers, make_batch(1, positions=None), 3)
    assert view.positions.tolist() == [100, 101, 102, 103] + [0] * 8
    assert storage[12:].tolist() == [112, 113, 114, 115]
    storage[:8] = torch.arange(8)
    view = pass_on(buffers, make_batch(2, positions="ignored"), 2)
    assert view.positions.tolist() == list(range(8))


def test_a_bound_optional_field_is_there(make_buffers):
    mask = torch.ones(4, 4, 4, dtype=torch.bool)
    buffers = make_buffers(bound_fields={"custom_mask": mask})
    assert buffers.view(4).custom_mask.data_ptr() == mask.data_ptr()
    assert "custom_mask" not in buffers.checks.absent


def test_every_field_may_be_bound(make_buffers):
    names = {name: torch.ones_like(t) for name, t in make_buffers().arena.tensors.items()}
    buffers = make_buffers(bound_fields=names)
    assert buffers.arena.nbytes == 0
    buffers.prepare(2)
    with buffers.posted():
        buffers.refresh(2)
    assert names["input_ids"].tolist() == [0] * 8 + [1] * 8


def test_an_idle_post_brings_pads_alone(make_buffers, pass_on, make_batch):
    buffers = make_buffers(optional_fields=OPTIONAL)
    more = {"input_embeds": np.ones((12, 8)), "custom_mask": np.zeros((3, 4, 4), bool)}
    for _ in range(5):  # every entry has held something else
        pass_on(buffers, make_batch(3, **more, mrope_positions=np.ones((3, 12), int)), 4)
    with buffers.posted():
        buffers.refresh(4)
    for name in (*NAMES, *OPTIONAL):
        pad = {"seq_lens": 1, "custom_mask": True}.get(name, 0)
        assert getattr(buffers.view(4), name).eq(pad).all(), name


@pytest.mark.parametrize("on_device", [False, True], ids=["in the entry", "by address"])
@pytest.mark.parametrize("turns", [0, 5], ids=["first", "later"])
def test_an_idle_post_pads_what_has_one_row_for_all(
    make_buffers, pass_on, make_batch, make_inputs, on_device, turns
):
    mine = declare(Axis.NONE, torch.float32, "of the run", row=("H",), pad=3, by_address=on_device)
    mine = make_inputs(TargetVerifyInputs, scales=mine)
    buffers = make_buffers(inputs_type=mine)
    rows = vars(make_batch(3)) | {"scales": np.full((1, 8), 8.0)}
    for _ in range(turns):
        assert pass_on(buffers, mine(**rows), 4).scales.eq(8).all()
    buffers.prepare(4)
    with buffers.posted():
        buffers.refresh(4)
    assert buffers.view(4).scales.eq(3).all()
