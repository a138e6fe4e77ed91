"""Heads of a layer with multi-head latent attention: normalise latents, rotate, and store them.

Dimensions: T rows, N query heads, R rank of the latents, F = E / 2 pairs of the rotated elements.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions
from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import AttentionError
from graphkit.ops.argument_rules import describe
from graphkit.ops.decoder import with_norm
from graphkit.ops.kv_cache import store_kv
from graphkit.ops.registration import register_op


def rotate_pairs(
    x: torch.Tensor,
    positions: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    factor: float,
    interleaved: bool,
    splits: bool,
) -> torch.Tensor:
    """Rotate rows [T, ..., E] by their positions, in float32; see ``store_latent_heads``."""
    pairs = x.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    angles = positions.view(-1, *[1] * (x.dim() - 1)) * inverse_frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    parts = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(parts, -1 if interleaved and not splits else -2)
    return joined.flatten(-2).to(x.dtype)


def empty_latent_query(args: Any) -> torch.Tensor:
    """Allocate the result of ``store_latent_heads``."""
    heads, rows, rank = args.latent_NTR.shape
    out: torch.Tensor = args.latent_NTR.new_empty(
        rows, heads, rank + 2 * len(args.inverse_frequencies)
    )
    return out


def _check_layout(args: Any) -> None:
    for name in ("latent_NTR", "rotated_TNE", "latents_TC"):
        if getattr(args, name).stride(-1) != 1:
            raise AttentionError(
                f"store_latent_heads: {name} is {describe(getattr(args, name))} with strides "
                f"{list(getattr(args, name).stride())}, expected contiguous elements of a head."
            )


@register_op(
    mutates_args=("cache",),
    fake=empty_latent_query,
    check=_check_layout,
    sizes_from=("inverse_frequencies", "positions", "latent_NTR"),
    error=AttentionError,
)
def store_latent_heads(
    cache: Annotated[torch.Tensor, "[slots, 1, R + 2 * F] floating-point"],
    loc_T: Annotated[torch.Tensor, "[T] int64"],
    latent_NTR: Annotated[torch.Tensor, "[N, T, R >= 1] floating-point"],
    rotated_TNE: Annotated[torch.Tensor, "[T, N, 2 * F] latent_NTR.dtype"],
    latents_TC: Annotated[torch.Tensor, "[T, R + 2 * F] latent_NTR.dtype"],
    positions: Annotated[torch.Tensor, "[T] int32 or int64"],
    inverse_frequencies: Annotated[torch.Tensor, "[F >= 1] float32"],
    weight: Annotated[torch.Tensor, "[R] floating-point"],
    eps: Annotated[float, "eps >= 0"],
    factor: Annotated[float, "factor >= 0"] = 1.0,
    interleaved: bool = False,
    splits: bool = False,
) -> torch.Tensor:
    """Store normalised latents and rotated keys, and join queries of latents (DeepSeek-V2).

    The first R elements of a row of ``latents_TC`` are normalised by ``rms_norm``. The others, and
    the rotated part of each query, are rotated by the position of the row, in float32
    (arXiv 2104.09864). Latent and rotated key of row t are written side by side into slot
    ``loc_T[t]``, as ``graphkit.ops.kv_cache.store_kv`` does. On CUDA it is one kernel.

    Args:
        cache: Rows of one layer of an ``MLATokenToKVPool``, each slot contiguous.
        loc_T: Slot of each row.
        latent_NTR: Queries of latents without their rotated part; see
            ``AbsorbedProjections.query``.
        rotated_TNE: The part of each query that is rotated.
        latents_TC: Latents, then the keys that are rotated.
        positions: Position of each row in its request.
        inverse_frequencies: Angle per position of each pair, F = E / 2.
        weight: Weight of the norm.
        eps: Of the norm.
        factor: Factor of cosine and sine.
        interleaved: Whether elements 2 i and 2 i + 1 are a pair; otherwise i and i + E / 2.
        splits: Whether interleaved pairs are stored as i and i + E / 2.

    Returns:
        Queries of latents with their rotated part last, [T, N, R + E].
    """
    rotation = positions, inverse_frequencies, factor, interleaved, splits
    latent, key = latents_TC.split([len(weight), 2 * len(inverse_frequencies)], -1)
    latents, keys = cache.split([latent.shape[1], key.shape[1]], -1)
    latent, key = with_norm(latent, weight, eps), rotate_pairs(key, *rotation)
    store_kv(latents, keys, loc_T, latent[:, None], key[:, None])
    return torch.cat((latent_NTR.transpose(0, 1), rotate_pairs(rotated_TNE, *rotation)), -1)
