"""Root mean square normalisation, alone and with the residual addition before it.

Dimensions: T rows, H hidden.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch.nn import functional

from graphkit.ops.registration import register_op


@register_op(fake=lambda given: given.x.new_empty(given.x.shape), differentiable=True)
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
    fake=lambda given: (given.x.new_empty(given.x.shape), given.x.new_empty(given.x.shape)),
    differentiable=True,
)
def add_rms_norm(
    x: Annotated[torch.Tensor, "[T, H >= 1] floating-point"],
    residual: Annotated[torch.Tensor, "[T, H] floating-point"],
    weight: Annotated[torch.Tensor, "[H] floating-point"],
    eps: Annotated[float, "eps >= 0"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream and normalise the sum; see ``rms_norm``.

    Args:
        x: Added to the stream.
        residual: The stream so far.
        weight: Factor of each column.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum, each [T, H] of x's dtype.
    """
    total = residual + x
    wide = functional.rms_norm(total.float(), total.shape[1:], eps=eps)
    return (weight * wide.to(x.dtype)).to(x.dtype), total
