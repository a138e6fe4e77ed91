"""Capture targets of models with random weights, such as for a record of their graphs.

    graphkit capture tools.bench.shape_targets:llama_8b --mode STEP --out record.json

The weights are made on the device. Their kernels are those of a trained model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from graphkit.models import random_model
from graphkit.runners.targets import CaptureTarget

sys.path.append(str(Path(__file__).parent))  # scripts of this folder import each other by name
LAYERS = 4
"""Layers of mixtures and hybrids: one of each kind, in a record that a screen shows at once."""


def shape_target(
    shape: str | Path, device: torch.device | str, algorithm: str = "EAGLE", name: str = ""
) -> CaptureTarget:
    """Create a target of one request for a model of a shape and its drafter."""
    target = random_model(shape, algorithm, device=device).target(max_batch_size=1)
    return replace(target, name=f"{name or shape}, {algorithm}")


def llama_8b(device: str = "cuda") -> CaptureTarget:
    """Create a target of the shape of Llama-3.1-8B. Needs 20 GB on the device."""
    return shape_target("llama-8b", device)


def qwen3_moe(device: str = "cuda") -> CaptureTarget:
    """Create a target of the shape of Qwen3-30B-A3B with few layers. Needs 7 GB."""
    return _served("Qwen3-30B-A3B, 12 layers", device)


def qwen3_next(device: str = "cuda") -> CaptureTarget:
    """Create a target of the shape of Qwen3-Next with few layers. Needs 10 GB."""
    return _served("Qwen3-Next, 12 layers", device)


def _served(name: str, device: str) -> CaptureTarget:
    from served_shapes import SHAPES

    shape = {**SHAPES[name], "num_hidden_layers": LAYERS}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return shape_target(Path(folder), device, "NGRAM", name.split(",")[0])
