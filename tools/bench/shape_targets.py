"""Capture targets of models with random weights, such as for a record of their graphs.

    graphkit capture tools.bench.shape_targets:llama_8b --mode STEP --out record.json

The weights are made on the device. Their kernels are those of a trained model.
"""

from __future__ import annotations

import torch

from graphkit.models.sharded import model_target
from graphkit.models.sharded.shapes import random_models
from graphkit.runners.targets import CaptureTarget


def shape_target(shape: str, device: torch.device | str) -> CaptureTarget:
    """Create a target of one request for a model of a shape and its EAGLE head."""
    models = random_models(shape, "EAGLE", device=device)
    return model_target(models.target, models.draft, name=f"{shape}, EAGLE", max_batch_size=1)


def llama_8b(device: str = "cuda") -> CaptureTarget:
    """Create a target of the shape of Llama-3.1-8B. Needs 20 GB on the device."""
    return shape_target("llama-8b", device)
