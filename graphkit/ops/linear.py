"""Products with weights of the dtype of their rows, and the kinds of results of all products.

Dimensions: T rows, K inputs, N outputs, S parts of the inputs.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.decoder import silu_and_mul
from graphkit.ops.registration import register_op

_FAST = (torch.bfloat16, torch.float16)
"""Dtypes that the kernel multiplies."""


def check_result(op: str, args: Any) -> None:
    """Refuse ``gated`` with ``in_parts``, and a gated weight with an odd number of rows."""
    if args.gated and args.in_parts:
        raise InputError(
            f"{op}: gated and in_parts are both True, but a gate is applied to whole sums. Pass "
            "one of them.",
            field="gated",
        )
    if args.gated and len(args.weight) % 2:
        raise InputError(
            f"{op}: weight is {describe(args.weight)}, expected an even number of rows: the "
            "gate's, then the up projection's.",
            field="weight",
        )


def result_of(product: torch.Tensor, gated: bool, in_parts: bool) -> torch.Tensor:
    """Return the result of the references of both ops from their product, [T, N]."""
    if gated:
        return silu_and_mul(product)
    return product[None] if in_parts else product


def empty_result(args: Any, bits: int) -> torch.Tensor:
    """Allocate the result of a product with numbers of so many bits."""
    x, (rows, inputs), outputs = args.x, args.x.shape, len(args.weight)
    if not args.in_parts:
        columns = outputs // 2 if args.gated else outputs
        return torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    parts = 1
    if x.device.type == "cuda":
        from graphkit.ops.kernels.quantized_linear_config import choose_product  # imports Triton

        product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype)
        parts = 1 if product is None else product.splits
    dtype = x.dtype if parts == 1 else torch.float32
    return torch.empty(parts, rows, outputs, dtype=dtype, device=x.device)


@register_op(
    fake=lambda args: empty_result(args, 8 * args.weight.element_size()),
    check=lambda args: check_result("linear", args),
    differentiable=True,
)
def linear(
    x: Annotated[torch.Tensor, "[T, K >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[N >= 1, K] x.dtype"],
    bias: Annotated[torch.Tensor | None, "[N] x.dtype"] = None,
    gated: bool = False,
    in_parts: bool = False,
) -> torch.Tensor:
    """Multiply rows with a weight, as ``torch.nn.functional.linear`` does.

    Few rows of bfloat16 or float16 on compute capability 9.0 and above run by a kernel that already
    starts, and requests its weight, while the kernel before it runs. ``choose_product`` of
    ``graphkit.ops.kernels`` has the limits. Other products run by ``torch.nn.functional.linear``.
    Up to two launches.

    Args:
        x: The rows.
        weight: The weight.
        bias: Added to the products.
        gated: Whether to return ``silu_and_mul`` of the products. The weight has the rows of the
            gate, then as many of the up projection.
        in_parts: Whether to return the sums of parts of the inputs. ``add_rms_norm``,
            ``rotated_heads`` and ``store_rotated_heads`` take them, so that no kernel adds them
            before. The rows, the weight and the device decide on the number of parts.

    Returns:
        The products, [T, N] of x's dtype; gated [T, N / 2]; in parts [S, T, N] of float32, or of
        x's dtype if S is 1.
    """
    return result_of(functional.linear(x, weight, bias), gated, in_parts)


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    in_parts: bool = False,
) -> torch.Tensor:
    """Return ``torch.nn.functional.linear``, by the op ``linear`` where it may be faster.

    That is on CUDA, in bfloat16 and float16, without gradients. The gradient of the op would run
    the product again.

    Args:
        x: Rows, [..., K].
        weight: The weight, [N, K].
        bias: Added to the products, [N].
        gated: As for ``linear``.
        in_parts: As for ``linear``.

    Returns:
        The products, [..., N]; gated [..., N / 2]; in parts [S, ..., N].
    """
    is_fast = x.is_cuda and x.dtype in _FAST and x.dtype == weight.dtype
    if is_fast and not torch.is_grad_enabled():
        out = linear(x.reshape(-1, x.shape[-1]), weight, bias, gated, in_parts)
        return out.view(*out.shape[:-2], *x.shape[:-1], out.shape[-1])
    out = functional.linear(x, weight, bias)
    if gated:
        return silu_and_mul(out.view(-1, len(weight))).view(*x.shape[:-1], len(weight) // 2)
    return out[None] if in_parts else out
