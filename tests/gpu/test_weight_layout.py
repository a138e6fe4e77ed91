"""Order of weights of draft heads in memory on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit.models.reference import reference_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "by_columns"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_only_float32_weights_are_stored_by_columns(dtype, by_columns):
    head = reference_model("EAGLE", device="cuda", dtype=dtype).draft.module
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all((layer.weight.stride(0) == 1) == by_columns for layer in layers)


def test_the_order_changes_no_value():
    head = reference_model("EAGLE", device="cuda").draft.module
    expected = reference_model("EAGLE", device="cpu").draft.module.state_dict()
    assert all(
        torch.equal(value.cpu(), expected[name]) for name, value in head.state_dict().items()
    )
