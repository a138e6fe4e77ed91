"""Implementations of experts in transformers: which can be captured, and the advice for others."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.errors import CaptureCause, CaptureError

transformers = pytest.importorskip("transformers")
examples = pytest.importorskip("tools.examples.minimal_target")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
of_kinds = pytest.mark.parametrize("kind", KINDS)


def capture(kind, dtype, experts, device):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **examples.SIZES, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation=experts
    )
    return gk.capture_target(examples.target_of(model, device), batch_sizes=[4], device=device)


@on_devices
@of_kinds
@pytest.mark.parametrize(
    ("experts", "dtype"),
    [
        ("batched_mm", torch.float32),
        ("batched_mm", torch.bfloat16),
        ("grouped_mm", torch.bfloat16),
    ],
)
def test_experts_of_static_shapes_are_captured(kind, experts, dtype, device):
    assert capture(kind, dtype, experts, device).mismatches == ()


@on_devices
@of_kinds
@pytest.mark.parametrize(
    ("experts", "dtype", "cause"),
    [
        ("eager", torch.bfloat16, CaptureCause.DATA_DEPENDENT_SHAPE),
        ("grouped_mm", torch.float32, CaptureCause.HOST_SYNCHRONISATION),
    ],
)
def test_the_error_of_other_experts_names_those_to_use(kind, experts, dtype, cause, device):
    advice = r"mlp\.experts.* Load the model with experts_implementation=\"batched_mm\", or with "
    with pytest.raises(CaptureError, match=advice + r"\"grouped_mm\" in bfloat16") as caught:
        capture(kind, dtype, experts, device)
    if device == "cpu":  # CUDA reports any wait
        assert caught.value.cause is cause
