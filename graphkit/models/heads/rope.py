"""Rotary position embedding, as in Hugging Face's Llama.

Tensor suffixes: T tokens, D head dim.
"""
# ruff: noqa: N803 -- the suffixes are shapes

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from graphkit.models.heads.config import LayerConfig

Rotation = tuple[Tensor, Tensor]
"""Positions, [T], and inverse frequencies, [D / 2] float32, as ``rotated_heads`` takes them."""


def inverse_frequencies(config: LayerConfig) -> Tensor:
    """Return the rotary frequencies, float32 [D / 2] on the CPU.

    Scaling of type ``llama3`` divides low frequencies by ``factor``, keeps high ones and
    interpolates between them (``apply_scaling`` in Meta's llama-models).
    """
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class RotaryEmbedding(nn.Module):
    """Frequencies of the rotary position embedding.

    ``inv_freq`` stays float32 when the model is cast: at large positions, rounded frequencies would
    change the angles by whole radians.
    """

    inv_freq: Tensor

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        frequencies = inverse_frequencies(config).to(torch.get_default_device())
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions_T: Tensor) -> Rotation:
        """Return the rotation of rows at positions [T]."""
        return positions_T, self.inv_freq

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.device == before.device:
            self.inv_freq = before  # keeps the storage, whose address captured graphs contain
        else:
            self.inv_freq = inverse_frequencies(self.config).to(self.inv_freq.device)
        return self
