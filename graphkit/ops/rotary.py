"""Heads of queries, keys and values, rotated by their positions.

Dimensions: T rows, N query heads, M key and value heads, D head size, F = D / 2.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.ops.registration import register_op
from graphkit.ops.rms_norm import rms_norm

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_heads(given: Any) -> Heads:
    """Allocate the results of ``rotated_heads``."""
    rows, size = len(given.qkv), 2 * len(given.inverse_frequencies)
    return (
        given.qkv.new_empty(rows, given.query_heads, size),
        given.qkv.new_empty(rows, given.key_heads, size),
        given.qkv.new_empty(rows, given.key_heads, size),
    )


@register_op(fake=empty_heads, differentiable=True, sizes_from=("inverse_frequencies", "positions"))
def rotated_heads(
    qkv: Annotated[torch.Tensor, "[T, 2 * (N + 2 * M) * F] floating-point"],
    positions: Annotated[torch.Tensor, "[T] int32 or int64"],
    inverse_frequencies: Annotated[torch.Tensor, "[F >= 1] float32"],
    query_heads: Annotated[int, "N >= 1"],
    key_heads: Annotated[int, "M >= 1"],
    query_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    key_weight: Annotated[torch.Tensor | None, "[2 * F] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
) -> Heads:
    """Split projected rows into heads, and rotate queries and keys by their positions (RoPE).

    Dimension i of a head is paired with i + D / 2, as in checkpoints of Hugging Face
    (arXiv 2104.09864). Angles are computed in float32; cosine and sine are applied in the dtype of
    the rows. With weights, queries and keys are normalised before by ``rms_norm`` (Qwen3).

    Args:
        qkv: Queries, then keys, then values of each row.
        positions: Position of each row in its request.
        inverse_frequencies: Angle per position of each pair, F = D / 2.
        query_heads: Query heads (N).
        key_heads: Key and value heads (M).
        query_weight: Weight of the queries' norm.
        key_weight: Weight of the keys' norm.
        eps: Of the norms.

    Returns:
        Queries [T, N, D], keys and values [T, M, D].
    """
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


def _normalised(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return heads
    return rms_norm(heads.flatten(0, 1), weight, eps).view(heads.shape)
