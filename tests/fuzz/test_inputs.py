"""Any batch is taken or refused by a GraphkitError, and the next one is right."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import graphkit as gk
from declared_modes import every_mode
from graphkit.buffers import fields_of
from graphkit.runners import RUNNERS
from graphkit.testing import batches

DTYPES = [
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint64, torch.bool, torch.float32,
    torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SIZES = gk.BufferSizes(3, 32, 4, 16, torch.float32)


def forward(inputs):
    """Takes all that there is."""
    rows = torch.nn.functional.embedding(inputs.input_ids, torch.eye(16))
    rows = rows + inputs.positions[:, None] / 64 + inputs.out_cache_loc[:, None] / 999
    if getattr(inputs, "hidden_states", None) is not None:
        rows = rows + inputs.hidden_states.sum(1, keepdim=True)
    return gk.ForwardOutput(next_token_logits=rows, hidden_states=rows[:, :4].contiguous())


ODD = st.sampled_from([
    None, 3, 2.5, "text", b"", [], [1], [[1, 2], [3]], (1, 2), {}, object(), {3}, range(4),
    SimpleNamespace(shape=(2,)), SimpleNamespace(shape=None, dtype=torch.int64),
    np.datetime64(1, "s"), np.array(["a", "b"]), np.array([object()]), np.float64(3),
    np.array([], dtype=np.int64), np.ma.array([1]), torch.empty(2, device="meta"),
    torch.eye(2).to_sparse(), torch.nn.Parameter(torch.zeros(2)),
])  # fmt: skip


@st.composite
def changed(draw, rows):
    """The rows of a field, changed in what they are or where they lie, or no rows at all."""
    if draw(st.integers(0, 3)) == 0:
        return draw(ODD)
    tensor = torch.as_tensor(rows)
    shape = list(tensor.shape)
    ways = {
        "as it is": lambda: tensor,
        "numpy": lambda: tensor.numpy(),
        "big-endian": lambda: tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")),
        "read-only": lambda: np.broadcast_to(tensor.numpy(), shape),
        "list": tensor.tolist,
        "a row less": lambda: tensor[:-1],
        "a row more": lambda: torch.cat([tensor, tensor[:1]]),
        "another dimension": lambda: tensor[..., None],
        "none": lambda: tensor[:0],
        "flat": tensor.flatten,
        "a scalar": lambda: tensor.flatten()[0],
        "apart": lambda: torch.stack([tensor, tensor], -1)[..., 0],
        "backwards": lambda: tensor.numpy()[::-1],
        "requires grad": lambda: tensor.float().requires_grad_(True),
        "dtype": lambda: tensor.to(draw(st.sampled_from(DTYPES))),
        "huge": lambda: torch.full_like(tensor.double(), draw(st.sampled_from(HUGE))),
        "negative": lambda: -tensor.double(),
    }
    return ways[draw(st.sampled_from(sorted(ways)))]()


HUGE = [2.0**40, 2.0**70, float("nan"), float("inf"), 0.5]
INDICES = ("input_ids", "topk_index", "select_index")
"""A device does not check numbers in these: the caller must pass valid ones."""


def spoilt(drawn):
    """A batch with at most two of its fields changed."""

    @st.composite
    def make(draw):
        batch = draw(drawn)
        names = [field.name for field in fields_of(type(batch)) if field.name not in INDICES]
        chosen = draw(st.lists(st.sampled_from([*names, "attention", "width"]), max_size=2))
        values = {}
        for name in dict.fromkeys(chosen):
            rows = getattr(batch, name)
            values[name] = draw(ODD if rows is None else changed(rows))
        return dataclasses.replace(batch, **values)

    return make()


def tried(call, *given, **facts):
    """What a call gives, or ``None`` if it is refused as a caller's mistake."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return call(*given, **facts)
    except gk.GraphkitError:
        return None


@pytest.mark.slow
@every_mode
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_any_batch_is_taken_or_refused(many, mode, topk):
    spec = gk.SpecConfig("EAGLE", 2, topk, 3 if topk == 1 else 4)
    is_chain = mode is gk.ForwardMode.MULTI_LAYER_EAGLE
    runner = RUNNERS[mode](
        [forward] * 2 if is_chain else forward,
        spec=spec, sizes=SIZES, batch_sizes=[1, 3], device="cpu",
    )  # fmt: skip
    runner.capture()
    drawn = batches(mode, spec, SIZES)
    seen = {True: 0, False: 0}

    @many(40)
    @given(spoilt(drawn), drawn, st.sampled_from(["replay", "run", "fall_back", "stage"]))
    def check(batch, sound, way):
        ok = bool(runner.can_replay(batch))
        seen[ok] += 1
        if way == "stage":
            took = tried(staged, runner, batch)
        else:
            took = tried(getattr(runner, way), batch)
        assert (took is not None) or not ok
        output = runner.replay(sound, clone=True).tensors()
        runner.shadow = "padded"
        for name, rows in runner.replay(sound).tensors().items():
            assert torch.equal(rows, output[name])
        runner.shadow = None

    check()
    runner.close()
    assert min(seen.values()) > 2


def staged(runner, batch):
    staged = runner.stage(batch.batch_size, batch.num_tokens)
    for field in fields_of(type(batch)):
        value = getattr(batch, field.name)
        if value is not None:
            setattr(staged, field.name, value)
    return staged.replay()
