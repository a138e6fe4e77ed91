"""Experts of models of transformers: results, gates, pads and the memory of their weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("graphkit.models")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import batched_mm_experts_forward

from graphkit import models
from graphkit.models import experts, running
from graphkit.models.quantization.linear import QuantizedExperts
from graphkit.models.quantization.weight import quantize_fp8, quantize_int4
from quantized_cases import dequantized_experts
from small_models import small_model

KINDS = {
    "qwen3_moe": {"interleaved": False, "limit": 0.0, "alpha": 1.0, "offset": 0.0},
    "gpt_oss": {"interleaved": True, "limit": 7.0, "alpha": 1.702, "offset": 1.0},
    "nemotron_h": None,
}
"""Types of models, and the gate of their experts that the op computes."""


def layer(kind="qwen3_moe", dtype=torch.float32):
    """The experts of the first layer that has some."""
    torch.manual_seed(0)
    model = small_model(kind).to(dtype).requires_grad_(False)
    experts.learn_gates(model)
    return next(
        each for each in model.modules() if hasattr(each, "down_proj") and hasattr(each, "has_gate")
    )


def rows_of(module, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    hidden = torch.randn(count, width, generator=generator).to(dtype)
    scores = torch.rand(count, module.num_experts, generator=generator)
    weights, index = scores.topk(2)
    return hidden, index, weights.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_transformers(kind, count):
    module = layer(kind)
    rows = rows_of(module, count)
    assert vars(module).get(experts._GATE) == KINDS[kind]
    expected = batched_mm_experts_forward(module, *rows)
    torch.testing.assert_close(experts.experts(module, *rows), expected)
    vars(module).pop(experts._GATE, None)  # the module computes its gate
    torch.testing.assert_close(experts.experts(module, *rows), expected)


def test_gradients_reach_the_weights():
    module = layer().requires_grad_(True)
    experts.experts(module, *rows_of(module, 5)).sum().backward()
    assert module.down_proj.grad.abs().sum() > 0


class Gathered(TorchDispatchMode):
    """The most bytes of weights that an operation gathers."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor and result.dim() == 3:
            self.most = max(self.most, result.nbytes)
        return result


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 40])
def test_no_weights_are_gathered(count, dtype):
    module = layer(dtype=dtype)
    rows = rows_of(module, count, dtype)
    with Gathered() as gathered:
        experts.experts(module, *rows)
    assert gathered.most == 0
    with Gathered() as gathered:
        batched_mm_experts_forward(module, *rows)
    assert gathered.most > 0


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_pads_of_the_forward_choose_no_expert(kind):
    """Their result is 0, also where only they chose experts, whose weights are NaN here."""
    module = layer(kind)
    hidden, index, weights = rows_of(module, 6)
    slots = torch.tensor([3, 0, 4, 0, 0, 9])
    index[slots > 0], index[slots == 0] = torch.tensor([0, 1]), torch.tensor([2, 3])
    expected = experts.experts(module, hidden, index, weights)
    module.down_proj[2:] = torch.nan
    forward = running.RunningForward(lambda call: None, slots, slots=slots)
    with forward.running():
        got = experts.experts(module, hidden, index, weights)
    assert torch.equal(got[slots > 0], expected[slots > 0])
    assert not got[slots == 0].any()
    with replace(forward, slots=slots[:3]).running():  # of other rows than those of the module
        assert experts.experts(module, hidden, index, weights)[slots == 0].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int4])
def test_quantised_experts_compute_as_their_dequantised_weights(quantize):
    module = layer()
    rows = rows_of(module, 9)
    names = "gate_up_proj", "down_proj"
    held = {name: QuantizedExperts([*map(quantize, getattr(module, name))]) for name in names}
    for name, weight in held.items():
        getattr(module, name).copy_(dequantized_experts(weight))
    expected = experts.experts(module, *rows)
    for name, weight in held.items():
        delattr(module, name)
        setattr(module, name, weight)
    torch.testing.assert_close(experts.experts(module, *rows), expected)


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_experts_are_quantised_at_load(quantize):
    """The check at load compares products of the kernels with the gate of the module."""
    loaded = models.load(small_model("qwen3_moe"), quantize=quantize, device="cpu")
    held = [module for module in loaded.model.modules() if isinstance(module, QuantizedExperts)]
    assert len(held) == 2 * loaded.model.config.num_hidden_layers
    assert {each.weight.dtype for each in held} == {
        torch.float8_e4m3fn if quantize == "fp8" else torch.uint8
    }
    names = [name for name, _ in loaded.model.named_parameters()]
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in names)
