"""Functions and small models with an example of their arguments, for gk.capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def unet(device: str) -> tuple[nn.Module, Any]:
    """Convolutions, and two arguments by position."""
    from tools.examples.captured_functions import UNet

    return UNet().to(device).eval(), (
        torch.randn(3, 3, 8, 8, device=device),
        torch.rand(3, device=device),
    )


def encoder_layer(device: str) -> tuple[nn.Module, Any]:
    """Takes its fused path in evaluation mode."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return layer.to(device).eval(), torch.randn(3, 5, 16, device=device)


def bert(device: str) -> tuple[nn.Module, Any]:
    """Takes arguments by name, and returns a dataclass."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_SMALL)).to(device).eval(), _tokens(device)


def modern_bert(device: str) -> tuple[nn.Module, Any]:
    """Has windows and rotary embeddings."""
    from transformers import ModernBertConfig, ModernBertModel

    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return ModernBertModel(ModernBertConfig(**_SMALL, **special)).to(device).eval(), _tokens(device)


MODELS = {each.__name__: each for each in (bert, modern_bert, encoder_layer, unet)}

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def called(fn: Callable[..., Any], example: Any, rows: list[int]) -> Any:
    """Call a function with rows of an example, and return its result, or the first part of it."""
    with torch.no_grad():
        if isinstance(example, dict):
            returned = fn(**{name: each[rows] for name, each in example.items()})
        else:
            given = (example,) if isinstance(example, torch.Tensor) else example
            returned = fn(*(each[rows] for each in given))
    return getattr(returned, "last_hidden_state", returned)


def _tokens(device: str) -> dict[str, torch.Tensor]:
    """Return three texts of 8, 5 and 8 tokens."""
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    ids = torch.randint(64, (3, 8))
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale[:, None]


def rows(count: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return arguments of ``scaled``, float32 [count, 4] and float64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), 1 + torch.arange(count).double()
