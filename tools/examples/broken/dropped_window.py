"""A wrapper that drops the window of its model.

graphkit audit tools.examples.broken.dropped_window:target

Error: the attention function takes any keyword and does not use ``sliding_window``.
Effect: the text changes as soon as a request is longer than the window. Every replay equals the
wrapper without a graph, so that only a comparison with the model finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

import graphkit as gk
from tools.examples.transformers_models import paged, random_model, wrapped


def attend(
    module: Any, *rows: Any, scaling: float, inputs: Any, backend: Any, **_ignored: Any
) -> tuple[torch.Tensor, None]:
    """Attend in one layer, called by transformers, to all keys."""
    return paged(module, *rows, scaling=scaling, inputs=inputs, backend=backend)


def target(device: str = "cpu") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    model = random_model("mistral")
    made = wrapped(model, device)
    AttentionInterface.register("without_window", attend)
    model.config._attn_implementation = "without_window"
    return made
