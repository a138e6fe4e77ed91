"""Heads of a decoder layer: split, normalise and rotate projected rows, and store them.

Dimensions: T rows, S partial sums, N query heads, M key and value heads, D head size, F = D / 2, C
columns.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch

from graphkit.errors import AttentionError, GraphkitError, InputError
from graphkit.ops.argument_rules import describe
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


def _check_columns(op: str, error: type[GraphkitError], args: Any) -> None:
    """Refuse rows that are not those of the heads, and a rotated part of another size."""
    size = 2 * len(args.inverse_frequencies)
    columns = _columns_of(args.query_heads, args.key_heads, args.gated) * size
    if args.qkv.shape[-1] != columns:
        expected = [*args.qkv.shape[:-1], columns]
        heads = "2 * N + 2 * M" if args.gated else "N + 2 * M"
        raise error(
            f"{op}: qkv is {describe(args.qkv)}, expected [..., ({heads}) * D] = {expected}."
        )
    if args.rotated % 2 or not 0 <= args.rotated <= size:
        raise error(
            f"{op}: rotated is {args.rotated}, expected an even number from 0 to {size}, the head "
            "size."
        )


def _columns_of(query_heads: int, key_heads: int, gated: bool) -> int:
    """Return the columns of projected rows, in heads."""
    return (2 if gated else 1) * query_heads + 2 * key_heads


@register_op(
    fake=empty_heads,
    check=partial(_check_columns, "rotated_heads", InputError),
    differentiable=True,
    sizes_from=("inverse_frequencies", "positions"),
)
def rotated_heads(
    qkv: Annotated[torch.Tensor, "[T, C] or [S, T, C] floating-point"],
    positions: Annotated[torch.Tensor, "[T] int32 or int64"],
    inverse_frequencies: Annotated[torch.Tensor, "[F >= 1] float32"],
    query_heads: Annotated[int, "N >= 0"],
    key_heads: Annotated[int, "M >= 1"],
    query_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    key_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
    dtype: torch.dtype | None = None,
    rotated: int = 0,
    gated: bool = False,
    factor: Annotated[float, "factor >= 0"] = 1.0,
) -> Heads:
    """Split projected rows into heads, and rotate queries and keys by their positions (RoPE).

    Dimension i of a head is paired with i + D / 2, as in checkpoints of Hugging Face
    (arXiv 2104.09864), or within the rotated part of a head. Angles are computed in float32; cosine
    and sine are applied in the dtype of the rows. With weights, queries and keys are normalised
    before by ``rms_norm`` (Qwen3).

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
        rotated: Elements of a head that are rotated, the first ones, whose frequencies are the
            first ``rotated / 2``; 0 for all.
        gated: Whether each query is followed by a gate of D elements, which is left out.
        factor: Factor of cosine and sine (the attention factor of YaRN, arXiv 2309.00071).

    Returns:
        Queries [T, N, D], keys and values [T, M, D].
    """
    qkv = reduce_partials(qkv, dtype or qkv.dtype)
    columns = _columns_of(query_heads, key_heads, gated)
    heads = qkv.view(len(qkv), columns, 2 * len(inverse_frequencies))
    if gated:
        queries, others = heads.split((2 * query_heads, 2 * key_heads), dim=1)
        heads = torch.cat((queries[:, ::2], others), dim=1)
    both, value = heads.split((query_heads + key_heads, key_heads), dim=1)
    if query_weight is not None or key_weight is not None:
        query, key = both.split((query_heads, key_heads), dim=1)
        both = torch.cat(
            (with_norm(query, query_weight, eps), with_norm(key, key_weight, eps)), dim=1
        )
    half = rotated // 2 or len(inverse_frequencies)
    angles = (positions[:, None] * inverse_frequencies[:half])[:, None]
    cos, sin = ((part * factor).to(qkv.dtype) for part in (angles.cos(), angles.sin()))
    first, second, rest = both.split((half, half, both.shape[-1] - 2 * half), dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    query, key = both.split((query_heads, key_heads), dim=1)
    return query.clone(), key.clone(), value.clone()


def _check_floating_caches(args: Any) -> None:
    """Refuse caches that cannot be written, and those that heads cannot be converted for."""
    _check_columns("store_rotated_heads", AttentionError, args)
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
    qkv: Annotated[torch.Tensor, "[T, C] or [S, T, C] floating-point"],
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
    rotated: int = 0,
    gated: bool = False,
    factor: Annotated[float, "factor >= 0"] = 1.0,
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
        rotated: See ``rotated_heads``, like the next two.
        gated: Whether gates follow the queries.
        factor: Factor of cosine and sine.

    Returns:
        Queries, [T, N, D].
    """
    query, key, value = rotated_heads(
        qkv, positions, inverse_frequencies, query_heads, key_heads, query_weight, key_weight, eps,
        dtype, rotated, gated, factor,
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
        rotated_size: Elements of a head that are rotated; 0 for all.
        gated: Whether each query is followed by a gate, with (2 * N + 2 * M) * D columns.
        factor: Factor of cosine and sine.
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
    rotated_size: int = 0
    gated: bool = False
    factor: float = 1.0

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
        scales = key_scale_M, value_scale_M
        return store_rotated_heads(
            key_cache, value_cache, loc_T, *self[:9], *scales, self.rotated_size, self.gated,
            self.factor,
        )  # fmt: skip
