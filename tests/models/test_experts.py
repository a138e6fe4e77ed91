"""Experts of models of transformers: their results, and the weights that are gathered at once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("graphkit.models")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import batched_mm_experts_forward

from graphkit.models import experts
from small_models import small_model


def layer(dtype=torch.float32):
    """The experts of the first layer that has some."""
    model = small_model("qwen3_moe").to(dtype)
    return next(each for each in model.modules() if hasattr(each, "gate_up_proj"))


def rows_of(module, count):
    generator = torch.Generator().manual_seed(count)
    width = module.down_proj.shape[1]
    hidden = torch.randn(count, width, generator=generator).to(module.down_proj.dtype)
    scores = torch.rand(count, module.num_experts, generator=generator)
    weights, index = scores.topk(2)
    return hidden, index, weights.to(hidden.dtype)


class Gathered(TorchDispatchMode):
    """The most bytes of weights that an operation gathers."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor and result.dim() == 3:
            self.most = max(self.most, result.nbytes)
        return result


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 5, 40])
def test_rows_share_the_memory_of_gathered_weights(monkeypatch, count):
    module = layer()
    rows = rows_of(module, count)
    expected = batched_mm_experts_forward(module, *rows)
    limit = 6 * max(each[0].nbytes for each in (module.gate_up_proj, module.down_proj))
    monkeypatch.setattr(experts, "_GATHERED_BYTES", limit)
    with Gathered() as gathered:
        found = experts.experts(module, *rows)
    torch.testing.assert_close(found, expected)
    assert 0 < gathered.most <= limit


@torch.no_grad()
def test_many_rows_in_bfloat16_gather_nothing():
    module = layer(torch.bfloat16)
    rows = rows_of(module, 40)
    with Gathered() as gathered:
        found = experts.experts(module, *rows)
    torch.testing.assert_close(found, batched_mm_experts_forward(module, *rows))
    assert gathered.most == 0
    with Gathered() as gathered:
        experts.experts(module, *(each[:1] for each in rows))
    assert gathered.most > 0
