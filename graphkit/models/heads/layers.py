"""Layers of a Llama-layout decoder. Their state dicts have the names of Hugging Face.

Tensor suffixes: T tokens, S parts of a product, H hidden, N query heads, M key and value heads,
D head dim.
Every forward can be captured in a CUDA graph: no host synchronisation, static shapes.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from typing import Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn

from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.merged_linear import MergedLinear, MergesProjections
from graphkit.models.heads.rope import Rotation
from graphkit.models.heads.sources import AuxStates
from graphkit.models.quantization import Linear, QuantizedLinear, quantize_linears
from graphkit.ops.decoder import add_rms_norm, rms_norm
from graphkit.ops.heads import ProjectedHeads
from graphkit.ops.linear import project
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.rows import gather_rows


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


@runtime_checkable
class AttendProjected(Attend, Protocol):
    """An ``Attend`` that can also rotate the heads, so that one kernel rotates and stores them."""

    def projected(self, layer: int, heads: ProjectedHeads, /) -> Tensor:
        """Rotate heads and attend in one layer, with the same results: [T, N, D]."""


class Embedding(nn.Embedding):
    """``torch.nn.Embedding``, whose rows are read by ``graphkit::gather_rows``.

    Where gradients are recorded, ``torch.nn.Embedding`` runs, whose gradient needs no second
    forward.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Embedding
        """Return the row of each token id, [...] to [..., H]."""
        if torch.is_grad_enabled():
            return super().forward(input)
        return gather_rows(self.weight, input.flatten()).view(*input.shape, self.embedding_dim)


class RMSNorm(nn.Module):
    """Root mean square normalisation of rows [T, size]; see ``graphkit.ops.decoder``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise rows; with ``residual``, return their normalised sum, and the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return self.add(x, residual)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum; see ``graphkit.ops.decoder.add_rms_norm``."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(MergesProjections):
    """Grouped-query attention. The caller stores keys and values.

    Args:
        config: Sizes and options.
        layer: Layer number passed to ``attend``.
        input_size: Width of the input rows; ``None`` selects the hidden size.
    """

    def __init__(self, config: LayerConfig, layer: int, *, input_size: int | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads, config.num_key_value_heads
        query_size, key_size = (count * config.head_dim for count in self.heads)
        self.qkv_proj: MergedLinear | QuantizedLinear = MergedLinear(
            input_size or config.hidden_size,
            {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size},
            bias=config.attention_bias,
        )
        self.o_proj: nn.Linear = Linear(query_size, config.hidden_size, bias=config.output_bias)
        self.eps = config.rms_norm_eps
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden_TH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Project to heads, rotate, call ``attend``, and project back.

        An ``AttendProjected`` rotates by itself.

        Shapes:
            hidden_TH: [T, H].
            result: [S, T, H], the parts of the last projection, for the norm behind it.
        """
        heads = ProjectedHeads(
            self.qkv_proj(hidden_TH, split_k_partials=True), *rotation, *self.heads,
            self.q_norm.weight if self.has_qk_norm else None,
            self.k_norm.weight if self.has_qk_norm else None,
            self.eps, hidden_TH.dtype,
        )  # fmt: skip
        if isinstance(attend, AttendProjected):
            attended_TND = attend.projected(self.layer, heads)
        else:
            attended_TND = attend(self.layer, *heads.rotated())
        out_STH: Tensor = self.o_proj(attended_TND.flatten(1), split_k_partials=True)
        return out_STH

    def keys_and_values(self, hidden_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return the keys, rotated, and the values of rows, [T, M, D] each, without queries."""
        (_, frequencies), (query_heads, key_heads) = rotation, self.heads
        first = query_heads * 2 * len(frequencies)
        kv = last_outputs(self.qkv_proj, hidden_TH, first)
        key_weight = self.k_norm.weight if self.has_qk_norm else None
        heads = ProjectedHeads(kv, *rotation, 0, key_heads, None, key_weight, self.eps)
        _, key_TMD, value_TMD = heads.rotated()
        return key_TMD, value_TMD


class MLP(MergesProjections):
    """SwiGLU feed-forward network."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = MergedLinear(
            config.hidden_size, {"gate_proj": width, "up_proj": width}, bias=False
        )
        self.down_proj: nn.Linear = Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_TH: Tensor, *, split_k_partials: bool = False) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), [T, H]; in parts [S, T, H], for a norm."""
        gated = self.gate_up_proj(hidden_TH, swiglu=True)
        out: Tensor = self.down_proj(gated, split_k_partials=split_k_partials)
        return out


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection.

    The caller applies ``input_layernorm``, and adds the result of the MLP to the residual stream.
    The norm of the next layer does both at once.

    Args:
        config: Sizes and options.
        layer: Layer number passed to ``attend``.
        has_input_norm: Whether attention has a norm before it; EAGLE's layer has none.
    """

    def __init__(self, config: LayerConfig, layer: int, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        if has_input_norm:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        normed_TH: Tensor,
        hidden_TH: Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        split_k_partials: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            normed_TH: The residual stream after ``input_layernorm``.
            hidden_TH: The residual stream.
            rotation: Rotation of the rows.
            attend: Stores keys and values, and attends.
            split_k_partials: Whether the result of the MLP is in parts, for a norm.

        Returns:
            The result of the MLP, and the residual stream to which the caller adds it.

        Shapes:
            normed_TH, hidden_TH, results: [T, H]; in parts, the first result is [S, T, H].
        """
        mixed_STH: Tensor = self.self_attn(normed_TH, rotation, attend)
        normed_TH, hidden_TH = self.post_attention_layernorm(mixed_STH, hidden_TH)
        return self.mlp(normed_TH, split_k_partials=split_k_partials), hidden_TH


def last_outputs(layer: nn.Linear | QuantizedLinear, rows_TH: Tensor, first: int) -> Tensor:
    """Return the outputs of a linear layer from ``first`` on, [T, N - first]."""
    bias = None if layer.bias is None else layer.bias[first:]
    if isinstance(layer, QuantizedLinear):
        part = layer.quantized.part(first, layer.out_features)
        return quantized_linear(rows_TH, part.numbers, part.scale, part.zero_point, bias)
    return project(rows_TH, layer.weight[first:], bias)


def quantize_layers(module: nn.Module, quantization: str) -> None:
    """Quantise the linear layers of the decoder layers in a model or head, in place.

    Other layers stay as they are: the output head, and those that merge the inputs of a head.

    Args:
        module: The model or head.
        quantization: A name of ``QUANTIZATIONS``.
    """
    for layer in module.modules():
        if isinstance(layer, Attention | MLP):
            quantize_linears(layer, quantization)


def store_by_columns(model: nn.Module) -> None:
    """Store the float32 weights of linear layers on CUDA column by column; values do not change.

    With weights by rows, cuBLAS 13 chooses kernels of 31 us for small float32 products of 8 or 16
    rows on an H200, and others of 6 us for weights by columns. Weights of other types stay by rows.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if weight.is_cuda and weight.dtype == torch.float32:
                weight.data = weight.data.t().contiguous().t()


def run_layers(
    layers: nn.ModuleList,
    final_norm: RMSNorm,
    hidden_TH: Tensor,
    rotation: Rotation,
    attend: Attend,
    aux: AuxStates | None = None,
) -> Tensor:
    """Run decoder layers and the norm behind them over rows, [T, H] to [T, H]."""
    aux = aux or AuxStates(())
    norms = [layer.get_submodule("input_layernorm") for layer in layers]
    norms.append(final_norm)
    normed_TH: Tensor = norms[0](hidden_TH)
    for number, layer in enumerate(layers):
        aux.record(number, hidden_TH)
        fed_STH, hidden_TH = layer(normed_TH, hidden_TH, rotation, attend, split_k_partials=True)
        normed_TH, hidden_TH = norms[number + 1](fed_STH, hidden_TH)
    aux.record(len(layers), hidden_TH)
    return normed_TH
