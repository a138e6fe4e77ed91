"""Layers of a Llama-layout decoder, with the parameter names of Hugging Face.

Tensor suffixes: T tokens, H hidden, N query heads, M key and value heads, D head dim.
Every forward can be captured in a CUDA graph: no host synchronisation, static shapes.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from graphkit.reference.config import LlamaConfig
from graphkit.reference.rope import Rotation, rotate


class Attend(Protocol):
    """Stores keys and values, then attends. Implemented by the caller of a model.

    Shapes:
        query_TND: [T, N, D], rotated and unscaled: divide the scores by sqrt(D).
        key_TMD, value_TMD: [T, M, D], the key rotated.
        result: [T, N, D].
    """

    def __call__(
        self, layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor, /
    ) -> Tensor:
        """Attend in one layer."""


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32; the weight is applied in x's dtype.

    Shapes:
        x, result: [..., size].
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * wide.to(x.dtype)
        return scaled


class Attention(nn.Module):
    """Grouped-query attention. The caller stores keys and values.

    Args:
        config: Sizes and options.
        layer: Layer number passed to ``attend``.
        input_size: Width of the input rows; ``None`` takes the hidden size.
    """

    def __init__(self, config: LlamaConfig, layer: int, *, input_size: int | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.has_qk_norm = config.qk_norm
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        input_size = input_size or config.hidden_size
        self.q_proj = nn.Linear(input_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden_TH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Project to heads, rotate, call ``attend``, and project back to [T, H]."""
        query_TND = self._split(self.q_proj(hidden_TH))
        key_TMD = self._split(self.k_proj(hidden_TH))
        value_TMD = self._split(self.v_proj(hidden_TH))
        if self.has_qk_norm:
            query_TND, key_TMD = self.q_norm(query_TND), self.k_norm(key_TMD)
        query_TND, key_TMD = rotate(query_TND, rotation), rotate(key_TMD, rotation)
        attended_TND = attend(self.layer, query_TND, key_TMD, value_TMD)
        out_TH: Tensor = self.o_proj(attended_TND.flatten(1))
        return out_TH

    def _split(self, flat: Tensor) -> Tensor:
        return flat.reshape(flat.shape[0], flat.shape[1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), [T, H]."""
        gated = silu(self.gate_proj(hidden_TH)) * self.up_proj(hidden_TH)
        out_TH: Tensor = self.down_proj(gated)
        return out_TH


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection.

    Args:
        config: Sizes and options.
        layer: Layer number passed to ``attend``.
        has_input_norm: Whether attention has a norm before it; EAGLE's layer has none.
    """

    def __init__(self, config: LlamaConfig, layer: int, *, has_input_norm: bool = True) -> None:
        super().__init__()
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if has_input_norm else nn.Identity()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = norm
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_TH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Return the residual stream after this layer, [T, H]."""
        mixed_TH: Tensor = self.self_attn(self.input_layernorm(hidden_TH), rotation, attend)
        hidden_TH = hidden_TH + mixed_TH
        fed_TH: Tensor = self.mlp(self.post_attention_layernorm(hidden_TH))
        return hidden_TH + fed_TH


def initialise(module: nn.Module, num_layers: int) -> None:
    """Initialise weights for training as GPT-2 does, from torch's global generator.

    Weights are normal with standard deviation 0.02. Projections that add to the residual stream of
    ``num_layers`` layers have 0.02 / sqrt(2 * num_layers). Biases are 0.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            is_residual = name.endswith(("o_proj", "down_proj"))
            std = 0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02
            nn.init.normal_(child.weight, std=std)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)
