"""Parts of decoder layers and draft heads: norms, the gate, and the inputs of a head.

Dimensions: T rows, S partial sums, H hidden, V vocabulary, C columns of gate and up projection or
of a gated norm, M columns of its gates, N columns of its groups, G weights of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op

VECTOR = 64
"""Multiple of the numbers that torch computes at once on a CPU."""


def in_vectors(
    function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Return an elementwise function of a tensor, with the bits that a number has at any place.

    Numbers behind the last whole vector have other bits on a CPU (torch 2.13, for example sigmoid,
    silu and gelu), so that a row would depend on the number of rows. They get a whole vector.
    """
    spare = -x.numel() % VECTOR
    if x.device.type != "cpu" or (not spare and x.is_contiguous()):
        return function(x, *args, **options)
    padded = functional.pad(x.flatten(), (0, spare))
    return function(padded, *args, **options)[: x.numel()].view(x.shape)


@register_op(differentiable=True)
def rms_norm(
    x: Annotated[torch.Tensor, "[T, H >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[H] floating-point"],
    eps: Annotated[float, "eps >= 0"],
) -> Annotated[torch.Tensor, "[T, H] x.dtype"]:
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


def empty_sums(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of ``add_rms_norm``."""
    total = torch.empty(args.residual.shape, dtype=args.residual.dtype, device=args.x.device)
    return torch.empty_like(total, dtype=args.weight.dtype if args.rounds else None), total


@register_op(differentiable=True, sizes_from=("residual",), fake=empty_sums)
def add_rms_norm(
    x: Annotated[torch.Tensor, "[T, H] or [S, T, H] floating-point"],
    residual: Annotated[torch.Tensor, "[T, H >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[H] floating-point"],
    eps: Annotated[float, "eps >= 0"],
    rounds: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream and normalise the sum; see ``rms_norm``.

    Args:
        x: Added to the stream; or partial sums of it, which are added in order first, in their
            dtype. It is rounded to the dtype of the stream, or of the weight with ``rounds``.
        residual: The stream so far.
        weight: Factor of each column.
        eps: Added to the mean square.
        rounds: Whether the norm reads the sum as rounded to the weight's dtype, for streams of
            float32 beside layers of two bytes.

    Returns:
        The normalised sum, and the sum, each [T, H] of the stream's dtype; with ``rounds`` the
        first is of the weight's.
    """
    dtype = weight.dtype if rounds else residual.dtype
    total = residual + reduce_partials(x, dtype)
    wide = functional.rms_norm(total.to(dtype).float(), total.shape[1:], eps=eps)
    return (weight * wide.to(dtype)).to(dtype), total


def _check_groups(args: Any) -> None:
    """Refuse weights and groups that do not divide the columns."""
    width, size, weights = args.x.shape[1], args.size, len(args.weight)
    if args.columns is None and args.gate.shape[1] < width:
        raise InputError(
            f"gated_rms_norm: gate is {describe(args.gate)}, expected at least {width} columns.",
            field="gate",
        )
    if width % size or weights not in (size, width):
        raise InputError(
            f"gated_rms_norm: x is {describe(args.x)}, size is {size} and weight is "
            f"{describe(args.weight)}, expected columns in groups of {size}, and a weight of one "
            "group or of all columns.",
            field="size",
        )


@register_op(check=_check_groups)
def gated_rms_norm(
    x: Annotated[torch.Tensor, "[T, C >= 1] floating-point"],
    gate: Annotated[torch.Tensor, "[T, M] floating-point"],
    weight: Annotated[torch.Tensor, "[G] floating-point"],
    eps: Annotated[float, "eps >= 0"],
    size: Annotated[int, "N >= 1"],
    gate_first: bool = False,
    sigmoid: bool = False,
    columns: Annotated[torch.Tensor | None, "[C] int64"] = None,
) -> Annotated[torch.Tensor, "[T, C] x.dtype"]:
    """Normalise groups of columns and multiply them with a gate, in float32.

    The result is ``weight * norm(x) * silu(gate)``, or ``weight * norm(x * silu(gate))`` (Mamba 2,
    arXiv 2405.21060), rounded once.

    Args:
        x: The rows.
        gate: Gates, in rows that may be spaced.
        weight: Factor of each column of a group, or of all columns.
        eps: Added to the mean square of a group.
        size: Columns of a group (N).
        gate_first: Whether rows are multiplied with the gate before they are normalised.
        sigmoid: Whether the gate is a sigmoid.
        columns: Column of ``gate`` for each column of x; None for the first C.

    Returns:
        The gated rows, [T, C].
    """
    wide = x.float()
    gates = (gate[:, : x.shape[1]] if columns is None else gate[:, columns]).float()
    factor = torch.reciprocal(1.0 + torch.exp(-gates))
    factor = factor if sigmoid else gates * factor
    if gate_first:
        wide = wide * factor
    groups = wide.unflatten(1, (-1, size))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    wide = (groups * scale * weight.float().view(-1, size)).flatten(1)
    out: torch.Tensor = wide if gate_first else wide * factor
    return out.to(x.dtype)


def reduce_partials(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [T, C], or the sum of partial sums [S, T, C] in order, in a dtype."""
    return (rows if rows.dim() == 2 else reduce(torch.add, rows.unbind())).to(dtype)


@register_op(differentiable=True)
def embed_and_join(
    ids: Annotated[torch.Tensor, "[T] int32 or int64"],
    embedding: Annotated[torch.Tensor, "[V >= 1, H >= 1] floating-point"],
    hidden: Annotated[torch.Tensor, "[T, H] embedding.dtype"],
    embedding_norm: Annotated[torch.Tensor | None, "[H] floating-point"] = None,
    hidden_norm: Annotated[torch.Tensor | None, "[H] floating-point"] = None,
    eps: Annotated[float, "eps >= 0"] = 0.0,
) -> Annotated[torch.Tensor, "[T, 2 * H] hidden.dtype"]:
    """Return the inputs of a draft head: the embedding of each token beside a hidden state.

    A half that has a weight is normalised before by ``rms_norm``: both halves in EAGLE-3
    (arXiv 2503.01840) and in MTP layers (arXiv 2412.19437), none in EAGLE (arXiv 2401.15077).

    Args:
        ids: Token of each row. An id outside ``embedding`` is an error on the CPU; on CUDA it
            counts as the nearest one.
        embedding: Row of each token.
        hidden: The hidden states.
        embedding_norm: Weight of the norm of embeddings; None for no norm.
        hidden_norm: Weight of the norm of hidden states; None for no norm.
        eps: Of the norms.

    Returns:
        The embeddings in the first H columns and the hidden states behind them, [T, 2 * H].
    """
    pairs = (embedding.index_select(0, ids), embedding_norm), (hidden, hidden_norm)
    return torch.cat([with_norm(rows, weight, eps) for rows, weight in pairs], dim=-1)


def with_norm(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return rows [..., C] after ``rms_norm``, or as they are without a weight."""
    if weight is None:
        return rows
    return rms_norm(rows.reshape(-1, rows.shape[-1]), weight, eps).view(rows.shape)


def _check_width(args: Any) -> None:
    """Refuse rows that have no two halves."""
    if args.gate_up.shape[1] % 2:
        raise InputError(
            f"silu_and_mul: gate_up is {describe(args.gate_up)}, expected an even number of "
            "columns: the gate's, then the up projection's.",
            field="gate_up",
        )


@register_op(check=_check_width, differentiable=True)
def silu_and_mul(
    gate_up: Annotated[torch.Tensor, "[T, C >= 2] floating-point"],
) -> Annotated[torch.Tensor, "[T, C // 2] gate_up.dtype"]:
    """Return ``silu(gate) * up`` of rows that hold both (SwiGLU, arXiv 2002.05202).

    silu is rounded to the dtype before the product.

    Args:
        gate_up: Columns of the gate, then as many of the up projection.

    Returns:
        The gated rows, [T, C / 2] of their dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return in_vectors(functional.silu, gate) * up
