"""A wrapper that does not pass positions to its model.

graphkit audit tools.examples.broken.dropped_positions:target

Error: without ``position_ids`` the model numbers the rows of each forward from 0.
Effect: prompts that are prefilled at once are right, and every step after them is wrong. Every
replay equals the wrapper without a graph, so that only a comparison with the model finds it.
``gk.models.load`` makes the comparison unless it is turned off, as here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import graphkit as gk

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def target(device: str = "cpu", config: PreTrainedConfig = CONFIG) -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    loaded = gk.models.load(model, device=device, check=False, fuse=False)
    forward = loaded.model.forward

    def without_positions(*, position_ids: torch.Tensor, **others: Any) -> Any:
        del position_ids
        return forward(**others)

    loaded.model.forward = without_positions
    return loaded.target(max_context_len=64)
