"""Products with weights of the dtype of their rows.

Dimensions: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op

_FAST = (torch.bfloat16, torch.float16)
"""Dtypes that the kernel multiplies."""


def _check_dtypes(args: Any) -> None:
    """Refuse a weight or a bias of another dtype than that of the rows."""
    for name in ("weight", "bias"):
        tensor = getattr(args, name)
        if tensor is not None and tensor.dtype != args.x.dtype:
            raise InputError(
                f"linear: {name} is {describe(tensor)}, expected the dtype of x, "
                f"{str(args.x.dtype).removeprefix('torch.')}.",
                field=name,
            )


@register_op(
    fake=lambda args: args.x.new_empty(len(args.x), len(args.weight)),
    check=_check_dtypes,
    differentiable=True,
)
def linear(
    x: Annotated[torch.Tensor, "[T, K >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[N >= 1, K] floating-point"],
    bias: Annotated[torch.Tensor | None, "[N] floating-point"] = None,
) -> torch.Tensor:
    """Multiply rows with a weight, as ``torch.nn.functional.linear`` does.

    Few rows of bfloat16 or float16 on compute capability 9.0 and above run by a kernel that starts
    while the kernel before it runs, and requests its weight by then. ``choose_product`` of
    ``graphkit.ops.kernels`` has the limits. Other products run by ``torch.nn.functional.linear``.
    Up to two launches.

    Args:
        x: The rows.
        weight: The weight, of x's dtype.
        bias: Added to the result, of x's dtype.

    Returns:
        The products, [T, N] of x's dtype.
    """
    return functional.linear(x, weight, bias)


def project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``torch.nn.functional.linear``, by the op ``linear`` where it may be faster.

    That is on CUDA, in bfloat16 and float16, without gradients. The gradient of the op would run
    the product again.

    Args:
        x: Rows, [..., K].
        weight: The weight, [N, K].
        bias: Added to the result, [N].

    Returns:
        The products, [..., N].
    """
    is_fast = x.is_cuda and x.dtype in _FAST and x.dtype == weight.dtype
    if not is_fast or torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))
