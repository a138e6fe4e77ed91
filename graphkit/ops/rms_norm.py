"""Root mean square normalisation, alone and with the residual addition before it.

Suffixes: T rows, H hidden.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch.nn import functional

from graphkit.ops.registration import register_op


@register_op(fake=lambda given: given.x.new_empty(given.x.shape), differentiable=True)
def rms_norm(
    x: Annotated[torch.Tensor, "[T, H >= 1]"],
    weight: Annotated[torch.Tensor, "[H]"],
    eps: Annotated[float, "eps >= 0"],
) -> torch.Tensor:
    """Normalise rows as Llama does: in float32, with the weight applied in x's dtype.

    The result is ``weight * (x / sqrt(mean(x ** 2) + eps))`` (arXiv 1910.07467). One launch on the
    current stream, none without rows. Never synchronises; may be captured and differentiated.

    Args:
        x: The rows.
        weight: Factor of each column.
        eps: Added to the mean square.

    Shapes:
        x: [T, H] of any float dtype. weight: [H]. Returns [T, H] of x's dtype.

    Raises:
        InputError: A tensor has the wrong shape or device, or ``eps`` is negative.
    """
    wide = functional.rms_norm(x.float(), x.shape[1:], eps=eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


@register_op(
    fake=lambda given: (given.x.new_empty(given.x.shape), given.x.new_empty(given.x.shape)),
    differentiable=True,
)
def add_rms_norm(
    x: Annotated[torch.Tensor, "[T, H >= 1]"],
    residual: Annotated[torch.Tensor, "[T, H]"],
    weight: Annotated[torch.Tensor, "[H]"],
    eps: Annotated[float, "eps >= 0"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream and normalise the sum; see ``rms_norm``.

    One launch on the current stream, none without rows. Never synchronises; may be captured and
    differentiated.

    Args:
        x: Added to the stream.
        residual: The stream so far.
        weight: Factor of each column.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum.

    Shapes:
        x, residual: [T, H] of one float dtype. weight: [H]. Returns two of [T, H], of that dtype.

    Raises:
        InputError: A tensor has the wrong shape or device, or ``eps`` is negative.
    """
    total = residual + x
    wide = functional.rms_norm(total.float(), total.shape[1:], eps=eps)
    return (weight * wide.to(x.dtype)).to(x.dtype), total
