"""Small models that nobody wrote for graphkit, with the arguments of a call: for gk.capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class UNet(nn.Module):
    """A denoiser of images: a level down and up, a skip connection, and a time embedding."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.time = nn.Linear(1, channels)
        self.inner = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.out = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the noise in each image."""
        hidden = self.inner(images) + self.time(times[:, None])[..., None, None]
        hidden = nn.functional.silu(self.norm(hidden))
        return self.out(torch.cat([hidden, self.up(self.down(hidden))], 1))


def unet(device: str) -> tuple[nn.Module, Any]:
    return UNet().to(device).eval(), (
        torch.randn(3, 3, 8, 8, device=device),
        torch.rand(3, device=device),
    )


def encoder_layer(device: str) -> tuple[nn.Module, Any]:
    """Takes its fused path in evaluation mode."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return layer.to(device).eval(), torch.randn(3, 5, 16, device=device)


def bert(device: str) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_SMALL)).to(device).eval(), _tokens(device)


def modern_bert(device: str) -> tuple[nn.Module, Any]:
    from transformers import ModernBertConfig, ModernBertModel

    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return ModernBertModel(ModernBertConfig(**_SMALL, **special)).to(device).eval(), _tokens(device)


MODELS = {each.__name__: each for each in (bert, modern_bert, encoder_layer, unet)}

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def _tokens(device: str) -> dict[str, torch.Tensor]:
    """Return three texts of 8, 5 and 8 tokens."""
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    ids = torch.randint(64, (3, 8))
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
