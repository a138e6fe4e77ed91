"""Order of weights in memory on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit.models.reference import default_checkpoint
from graphkit.models.sharded import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "by_columns"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_only_float32_weights_are_stored_by_columns(dtype, by_columns):
    model = load_checkpoint(default_checkpoint(), device="cuda", dtype=dtype)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all((layer.weight.stride(0) == 1) == by_columns for layer in layers)


def test_the_order_changes_no_value_and_no_saved_weight(tmp_path):
    model = load_checkpoint(default_checkpoint(), device="cuda")
    expected = load_checkpoint(default_checkpoint()).state_dict()
    assert all(
        torch.equal(value.cpu(), expected[name]) for name, value in model.state_dict().items()
    )
    save_checkpoint(model, tmp_path)
    saved = load_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
