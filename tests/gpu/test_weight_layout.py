"""Order of weights of draft heads in memory on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit.models.reference import reference_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_stored_by_rows(dtype):
    """Otherwise cuBLAS multiplies, and the bits of a row depend on the number of rows."""
    head = reference_model("EAGLE", device="cuda", dtype=dtype).draft.module
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all(layer.weight.is_contiguous() for layer in layers)


def test_values_are_those_on_a_cpu():
    head = reference_model("EAGLE", device="cuda").draft.module
    expected = reference_model("EAGLE", device="cpu").draft.module.state_dict()
    assert all(
        torch.equal(value.cpu(), expected[name]) for name, value in head.state_dict().items()
    )
