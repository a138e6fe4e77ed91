"""Heads of a decoder layer: split, normalise and rotate projected rows, and store them.

Dimensions: T rows, S partial sums, N query heads, M key and value heads, D head size, F = D / 2.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from graphkit.errors import AttentionError
from graphkit.ops.decoder import reduce_partials, with_norm
from graphkit.ops.kv_cache import check_caches, store_kv
from graphkit.ops.registration import register_op

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_heads(args: Any) -> Heads:
    """Allocate the results of ``rotated_heads``."""
    query, key, value = (
        _empty(args, heads) for heads in (args.query_heads, args.key_heads, args.key_heads)
    )
    return query, key, value


def empty_query(args: Any) -> torch.Tensor:
    """Allocate the result of ``store_rotated_heads``."""
    return _empty(args, args.query_heads)


def _empty(args: Any, heads: int) -> torch.Tensor:
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
        qkv: Queries, then keys, then values of each row; or partial sums of them, which are added
            in order first, in their dtype.
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
    qkv = reduce_partials(qkv, dtype or qkv.dtype)
    heads = qkv.view(len(qkv), query_heads + 2 * key_heads, 2 * len(inverse_frequencies))
    both, value = heads.split((query_heads + key_heads, key_heads), dim=1)
    if query_weight is not None or key_weight is not None:
        query, key = both.split((query_heads, key_heads), dim=1)
        both = torch.cat(
            (with_norm(query, query_weight, eps), with_norm(key, key_weight, eps)), dim=1
        )
    angles = (positions[:, None] * inverse_frequencies)[:, None]
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    first, second = both.chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    query, key = both.split((query_heads, key_heads), dim=1)
    return query.clone(), key.clone(), value.clone()


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


class ProjectedHeads(NamedTuple):
    """Projected rows of a layer before they are split and rotated: arguments of ``rotated_heads``.

    Attributes:
        qkv: [T, (N + 2 * M) * D], or partial sums of them, [S, T, (N + 2 * M) * D].
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
        return rotated_heads(*self)

    def store(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        loc_T: torch.Tensor,
        key_scale_M: torch.Tensor | None = None,
        value_scale_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values, and return queries, [T, N, D], by ``store_rotated_heads``."""
        return store_rotated_heads(key_cache, value_cache, loc_T, *self, key_scale_M, value_scale_M)
