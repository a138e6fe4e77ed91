"""Parts of a decoder layer other than its products: inputs, norms, rotation, the gate.

Dimensions: T rows, S parts, H hidden, V vocabulary, N query heads, M key and value heads, D head
size, F = D / 2, C columns of gate and up projection.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

import torch
from torch.nn import functional
from torch.nn.functional import silu

from graphkit.errors import AttentionError, InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.kv_cache import check_caches, store_kv
from graphkit.ops.registration import register_op


@register_op(fake=lambda args: args.x.new_empty(args.x.shape), differentiable=True)
def rms_norm(
    x: Annotated[torch.Tensor, "[T, H >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[H] floating-point"],
    eps: Annotated[float, "eps >= 0"],
) -> torch.Tensor:
    """Normalise rows as Llama does: in float32, with the weight applied in x's dtype.

    The result is ``weight * (x / sqrt(mean(x ** 2) + eps))`` (arXiv 1910.07467).

    Args:
        x: The rows.
        weight: Factor of each column.
        eps: Added to the mean square.

    Returns:
        The normalised rows, [T, H] of x's dtype.
    """
    wide = functional.rms_norm(x.float(), x.shape[1:], eps=eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


@register_op(
    fake=lambda args: (torch.empty_like(args.residual), torch.empty_like(args.residual)),
    differentiable=True,
    sizes_from=("residual",),
)
def add_rms_norm(
    x: Annotated[torch.Tensor, "[T, H] or [S, T, H] floating-point"],
    residual: Annotated[torch.Tensor, "[T, H >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[H] floating-point"],
    eps: Annotated[float, "eps >= 0"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream and normalise the sum; see ``rms_norm``.

    Args:
        x: Added to the stream; or parts of it, which are added in order first, in their dtype.
            It is rounded to the dtype of the stream.
        residual: The stream so far.
        weight: Factor of each column.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum, each [T, H] of the stream's dtype.
    """
    total = residual + _whole(x, residual.dtype)
    wide = functional.rms_norm(total.float(), total.shape[1:], eps=eps)
    return (weight * wide.to(total.dtype)).to(total.dtype), total


def _whole(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [T, C], or the sum of their parts [S, T, C] in order, in a dtype."""
    return (rows if rows.dim() == 2 else reduce(torch.add, rows.unbind())).to(dtype)


def _check_dtypes(args: Any) -> None:
    """Refuse halves of two dtypes."""
    if args.embedding.dtype != args.hidden.dtype:
        raise InputError(
            f"embed_and_join: embedding is {describe(args.embedding)}, expected the dtype of "
            f"hidden, {str(args.hidden.dtype).removeprefix('torch.')}.",
            field="embedding",
        )


@register_op(
    fake=lambda args: args.hidden.new_empty(args.hidden.shape[0], 2 * args.hidden.shape[1]),
    check=_check_dtypes,
    differentiable=True,
)
def embed_and_join(
    ids: Annotated[torch.Tensor, "[T] int32 or int64"],
    embedding: Annotated[torch.Tensor, "[V >= 1, H >= 1] floating-point"],
    hidden: Annotated[torch.Tensor, "[T, H] floating-point"],
    embedding_norm: Annotated[torch.Tensor | None, "[H] floating-point"] = None,
    hidden_norm: Annotated[torch.Tensor | None, "[H] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
) -> torch.Tensor:
    """Return the inputs of a draft head: the embedding of each token beside a hidden state.

    A half that has a weight is normalised before by ``rms_norm``: both halves in EAGLE-3
    (arXiv 2503.01840) and in MTP layers (arXiv 2412.19437), none in EAGLE (arXiv 2401.15077).

    Args:
        ids: Token of each row. An id outside ``embedding`` is an error on the CPU; on CUDA it
            counts as the nearest one.
        embedding: Row of each token.
        hidden: The hidden states, of the dtype of ``embedding``.
        embedding_norm: Weight of the norm of embeddings; None for no norm.
        hidden_norm: Weight of the norm of hidden states; None for no norm.
        eps: Of the norms.

    Returns:
        The embeddings in the first H columns and the hidden states behind them, [T, 2 * H].
    """
    pairs = (embedding.index_select(0, ids), embedding_norm), (hidden, hidden_norm)
    return torch.cat([_normalised(rows, weight, eps) for rows, weight in pairs], dim=-1)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_query(args: Any) -> torch.Tensor:
    """Allocate the queries that ``rotated_heads`` or ``store_rotated_heads`` returns."""
    return _empty_heads(args, args.query_heads)


def empty_heads(args: Any) -> Heads:
    """Allocate the results of ``rotated_heads``."""
    key, value = (_empty_heads(args, args.key_heads) for _ in "kv")
    return empty_query(args), key, value


def _empty_heads(args: Any, heads: int) -> torch.Tensor:
    shape = len(args.positions), heads, 2 * len(args.inverse_frequencies)
    out: torch.Tensor = args.qkv.new_empty(shape, dtype=args.dtype or args.qkv.dtype)
    return out


@register_op(fake=empty_heads, differentiable=True, sizes_from=("inverse_frequencies", "positions"))
def rotated_heads(
    qkv: Annotated[
        torch.Tensor, "[T, 2 * (N + 2 * M) * F] or [S, T, 2 * (N + 2 * M) * F] floating-point"
    ],
    positions: Annotated[torch.Tensor, "[T] int32 or int64"],
    inverse_frequencies: Annotated[torch.Tensor, "[F >= 1] float32"],
    query_heads: Annotated[int, "N >= 0"],
    key_heads: Annotated[int, "M >= 1"],
    query_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    key_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
    dtype: torch.dtype | None = None,
) -> Heads:
    """Split projected rows into heads, and rotate queries and keys by their positions (RoPE).

    Dimension i of a head is paired with i + D / 2, as in checkpoints of Hugging Face
    (arXiv 2104.09864). Angles are computed in float32; cosine and sine are applied in the dtype of
    the rows. With weights, queries and keys are normalised before by ``rms_norm`` (Qwen3).

    Args:
        qkv: Queries, then keys, then values of each row; or parts of them, which are added in order
            first, in their dtype.
        positions: Position of each row in its request.
        inverse_frequencies: Angle per position of each pair, F = D / 2.
        query_heads: Query heads (N); 0 for rows that have keys and values only.
        key_heads: Key and value heads (M).
        query_weight: Weight of the queries' norm.
        key_weight: Weight of the keys' norm.
        eps: Of the norms.
        dtype: The dtype of the rows, to which ``qkv`` is rounded; None for its own.

    Returns:
        Queries [T, N, D], keys and values [T, M, D].
    """
    qkv = _whole(qkv, dtype or qkv.dtype)
    heads = qkv.view(len(qkv), query_heads + 2 * key_heads, 2 * len(inverse_frequencies))
    both, value = heads.split((query_heads + key_heads, key_heads), dim=1)
    if query_weight is not None or key_weight is not None:
        query, key = both.split((query_heads, key_heads), dim=1)
        both = torch.cat(
            (_normalised(query, query_weight, eps), _normalised(key, key_weight, eps)), dim=1
        )
    angles = (positions[:, None] * inverse_frequencies)[:, None]
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    first, second = both.chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    query, key = both.split((query_heads, key_heads), dim=1)
    return query.clone(), key.clone(), value.clone()


def _normalised(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return rows [..., C] after ``rms_norm``, or as they are without a weight."""
    if weight is None:
        return rows
    return rms_norm(rows.reshape(-1, rows.shape[-1]), weight, eps).view(rows.shape)


def _check_floating_caches(args: Any) -> None:
    """Refuse caches that cannot be written, and those that heads cannot be converted for."""
    check_caches("store_rotated_heads", args)
    if not args.key_cache.is_floating_point():
        raise AttentionError(
            f"store_rotated_heads: the caches hold {args.key_cache.dtype}, expected a "
            "floating-point dtype, to which the heads are converted."
        )


@register_op(
    mutates_args=("key_cache", "value_cache"),
    fake=empty_query,
    check=_check_floating_caches,
    sizes_from=("inverse_frequencies", "positions"),
    error=AttentionError,
)
def store_rotated_heads(
    key_cache: Annotated[torch.Tensor, "[slots, M, 2 * F]"],
    value_cache: Annotated[torch.Tensor, "[slots, M, 2 * F]"],
    loc_T: Annotated[torch.Tensor, "[T] int64"],
    qkv: Annotated[
        torch.Tensor, "[T, 2 * (N + 2 * M) * F] or [S, T, 2 * (N + 2 * M) * F] floating-point"
    ],
    positions: Annotated[torch.Tensor, "[T] int32 or int64"],
    inverse_frequencies: Annotated[torch.Tensor, "[F >= 1] float32"],
    query_heads: Annotated[int, "N >= 0"],
    key_heads: Annotated[int, "M >= 1"],
    query_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    key_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
    dtype: torch.dtype | None = None,
    key_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
    value_scale_M: Annotated[torch.Tensor | None, "[M] float32"] = None,
) -> torch.Tensor:
    """Split and rotate projected rows by ``rotated_heads``, and store keys and values.

    Writes the keys and values of row t into slot ``loc_T[t]`` as ``graphkit.ops.kv_cache.store_kv``
    does, with the same bits as both ops one after the other. On CUDA it is one kernel.

    Args:
        key_cache: See ``store_kv``, like the next two. Of a floating-point dtype.
        value_cache: Values of the layer.
        loc_T: Slot of each row.
        qkv: See ``rotated_heads``, like all up to ``dtype``.
        positions: Position of each row in its request.
        inverse_frequencies: Angle per position of each pair, F = D / 2.
        query_heads: Query heads (N).
        key_heads: Key and value heads (M).
        query_weight: Weight of the queries' norm.
        key_weight: Weight of the keys' norm.
        eps: Of the norms.
        dtype: The dtype of the rows. Keys and values are rounded to it, and then converted to the
            dtype of the caches.
        key_scale_M: See ``store_kv``, like the next.
        value_scale_M: Divides the values of each head.

    Returns:
        Queries, [T, N, D].
    """
    query, key, value = rotated_heads(
        qkv, positions, inverse_frequencies, query_heads, key_heads, query_weight, key_weight, eps,
        dtype,
    )  # fmt: skip
    store_kv(key_cache, value_cache, loc_T, key, value, key_scale_M, value_scale_M)
    return query


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedHeads:
    """Projected rows of a layer before they are split and rotated: arguments of ``rotated_heads``.

    Attributes:
        qkv: [T, (N + 2 * M) * D], or parts of them, [S, T, (N + 2 * M) * D].
        positions: [T] int32 or int64.
        inverse_frequencies: [D / 2] float32.
        query_heads: Query heads (N).
        key_heads: Key and value heads (M).
        query_weight: [D]; ``None`` without a norm.
        key_weight: [D]; ``None`` without a norm.
        eps: Of the norms.
        dtype: The dtype of the rows; ``None`` for that of ``qkv``.
    """

    qkv: torch.Tensor
    positions: torch.Tensor
    inverse_frequencies: torch.Tensor
    query_heads: int
    key_heads: int
    query_weight: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    eps: float = 0.0
    dtype: torch.dtype | None = None

    def rotated(self) -> Heads:
        """Return queries, [T, N, D], keys and values, [T, M, D], by ``rotated_heads``."""
        return rotated_heads(*self._arguments())

    def store(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        loc_T: torch.Tensor,
        key_scale_M: torch.Tensor | None = None,
        value_scale_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values, and return queries, [T, N, D], by ``store_rotated_heads``."""
        arguments = *self._arguments(), key_scale_M, value_scale_M
        return store_rotated_heads(key_cache, value_cache, loc_T, *arguments)

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.qkv, self.positions, self.inverse_frequencies, self.query_heads, self.key_heads,
            self.query_weight, self.key_weight, self.eps, self.dtype,
        )  # fmt: skip


def _check_width(args: Any) -> None:
    """Refuse rows that have no two halves."""
    if args.gate_up.shape[1] % 2:
        raise InputError(
            f"silu_and_mul: gate_up is {describe(args.gate_up)}, expected an even number of "
            "columns: the gate's, then the up projection's.",
            field="gate_up",
        )


@register_op(
    fake=lambda args: args.gate_up.new_empty(len(args.gate_up), args.gate_up.shape[1] // 2),
    check=_check_width,
    differentiable=True,
)
def silu_and_mul(gate_up: Annotated[torch.Tensor, "[T, C >= 2] floating-point"]) -> torch.Tensor:
    """Return ``silu(gate) * up`` of rows that hold both (SwiGLU, arXiv 2002.05202).

    silu is rounded to the dtype before the product.

    Args:
        gate_up: Columns of the gate, then as many of the up projection.

    Returns:
        The gated rows, [T, C / 2] of their dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
