"""A forward that writes into its inputs changes none of the caller's tensors, in any mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from graphkit.buffers import fields_of
from graphkit.errors import InputError
from graphkit.models.reference import reference_target
from graphkit.runners import RUNNERS
from graphkit.spec import ForwardMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [mode for mode in RUNNERS if mode is not ForwardMode.STEP]


@pytest.fixture(scope="module", params=DEVICES)
def target(request):
    return reference_target(device=request.param, max_batch_size=2)


def present(inputs):
    """Return the fields of a batch or of inputs that are not ``None``, by name."""
    named = {field.name: getattr(inputs, field.name) for field in fields_of(type(inputs))}
    return {name: value for name, value in named.items() if value is not None}


def overwriting(forward):
    """Return a forward, or one for each of several, that clears its inputs when it is done."""
    if isinstance(forward, (Sequence, nn.ModuleList)):
        return [overwriting(each) for each in forward]

    def overwrite(inputs):
        output = forward(inputs)
        for tensor in present(inputs).values():
            tensor.zero_()
        return output

    return overwrite


def with_tensors(batch, runner):
    """Return the batch with fields that need no cast, which a runner may use as they are."""
    dtypes = {layout.name: layout.dtype for layout in runner.buffers.layouts}
    rows = {
        name: (value if torch.is_tensor(value) else torch.as_tensor(np.asarray(value)))
        .to(runner.device, dtypes[name])
        .contiguous()
        for name, value in present(batch).items()
    }
    return replace(batch, **rows)


@pytest.mark.parametrize("way", ["planned", "captured", "fall_back", "run_padded"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_no_run_changes_the_tensors_of_its_batch(target, mode, way):
    forwards = {mode: overwriting(target.forwards[mode])}
    device = next(iter(target.weights.values())).device
    with replace(target, forwards=forwards).runner(mode, device=device) as runner:
        batch = with_tensors(target.batch(mode, 2, seed=3), runner)
        before = {name: rows.clone() for name, rows in present(batch).items()}
        if way == "captured":
            runner.capture()
        run = getattr(runner, way, runner.run)
        run(batch)
        run(batch)
        for name, rows in present(batch).items():
            assert torch.equal(rows, before[name]), name


@pytest.mark.parametrize("spans", [[range(3)], [range(3), range(4)], [range(2), range(2)]], ids=str)
def test_spans_of_other_rows_are_refused(spans):
    target = reference_target(device="cpu", max_batch_size=2)
    with target.runner(ForwardMode.TARGET_VERIFY, device="cpu") as runner:
        batch = target.batch(ForwardMode.TARGET_VERIFY, 2, seed=3)
        ids, positions, slots = (
            getattr(batch, name)[:5] for name in ("input_ids", "positions", "out_cache_loc")
        )
        packed = replace(
            batch, input_ids=ids, positions=positions, out_cache_loc=slots,
            lengths=torch.tensor([3, 2], dtype=torch.int32), width=3, spans=spans,
        )  # fmt: skip
        with pytest.raises(InputError, match=r"spans has .* the batch has 2 requests of 5 rows"):
            runner.fall_back(packed)
        runner.fall_back(replace(packed, spans=[range(3), range(7, 9)]))
