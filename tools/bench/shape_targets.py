"""Capture targets of models with random weights, such as for a record of their graphs.

    graphkit capture tools.bench.shape_targets:llama_8b --mode STEP --out record.json

The weights are made on the device. Their kernels are those of a trained model.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from graphkit.models import random_model
from graphkit.runners.targets import CaptureTarget


def shape_target(shape: str, device: torch.device | str) -> CaptureTarget:
    """Create a target of one request for a model of a shape and its EAGLE head."""
    target = random_model(shape, "EAGLE", device=device).target(max_batch_size=1)
    return replace(target, name=f"{shape}, EAGLE")


def llama_8b(device: str = "cuda") -> CaptureTarget:
    """Create a target of the shape of Llama-3.1-8B. Needs 20 GB on the device."""
    return shape_target("llama-8b", device)
