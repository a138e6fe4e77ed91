"""Implementations of experts in transformers: which can be captured, and the advice for others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import graphkit as gk
from graphkit.errors import CaptureCause, CaptureError
from transformers_engine import example

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
of_kinds = pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])


def capture(kind, dtype, experts, device):
    target = example().wrapped(example().random_model(kind, dtype, experts), device)
    return gk.capture_target(target, batch_sizes=[4], device=device)


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
