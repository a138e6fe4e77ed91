"""A wrapper that drops the window of its model.

graphkit audit tools.examples.broken.dropped_window:target

Error: the attention function takes any keyword and does not use ``sliding_window``.
Effect: the text changes as soon as a request is longer than the window. Every replay equals the
wrapper without a graph, so that only a comparison with the model finds it. ``gk.models.load``
makes the comparison unless it is turned off, as here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM

import graphkit as gk
from graphkit.models.forward import attention

CONFIG = MistralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=8, max_position_embeddings=64,
)  # fmt: skip


def attend(
    *rows: Any,
    sliding_window: int | None = None,  # noqa: ARG001 - the error
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer, called by transformers, to all keys."""
    return attention(*rows, **others)


def target(device: str = "cpu") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    loaded = gk.models.load(MistralForCausalLM(CONFIG), device=device, check=False, fuse=False)
    AttentionInterface.register("without_window", attend)
    loaded.model.config._attn_implementation = "without_window"
    return loaded.target(max_context_len=64)
