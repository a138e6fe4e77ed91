"""Products with weights of eight or four bits, which are dequantised on the way.

Dimensions: T rows, K inputs, N outputs, L bytes of a row of the weight, R rows and C columns of
scales, S partial sums. A block is 128 inputs or outputs.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.linear import check_result, empty_result, multiply, result_of
from graphkit.ops.quantized_layout import BLOCK, blocks, dequantized, pairs
from graphkit.ops.registration import register_op


def _check(args: Any) -> None:
    """Refuse weights and scales that fit no layout of ``quantized_linear``."""
    check_result("quantized_linear", args)
    (outputs, length), inputs = args.weight.shape, args.x.shape[1]
    is_packed = args.weight.dtype == torch.uint8
    expected = pairs(inputs) * BLOCK if is_packed else inputs
    if length != expected:
        raise InputError(
            f"quantized_linear: weight is {describe(args.weight)}, expected {expected} columns for "
            f"{inputs} inputs.",
            field="weight",
        )
    rows, columns = args.scale.shape
    if rows not in (1, blocks(outputs), outputs) or columns not in (1, blocks(inputs)):
        raise InputError(
            f"quantized_linear: scale is {describe(args.scale)}, expected 1, "
            f"{blocks(outputs)} or {outputs} rows and 1 or {blocks(inputs)} columns.",
            field="scale",
        )
    if is_packed and rows != outputs:
        raise InputError(
            f"quantized_linear: scale is {describe(args.scale)}, expected {outputs} rows, one for "
            "each output of a packed weight.",
            field="scale",
        )
    if not is_packed and args.zero_point is not None:
        raise InputError(
            "quantized_linear: zero_point is for numbers of four bits, but weight is "
            f"{describe(args.weight)}. Pass None.",
            field="zero_point",
        )


@register_op(
    fake=lambda args: empty_result(args, 4 if args.weight.dtype == torch.uint8 else 8),
    check=_check,
    sizes_from=("x", "weight", "scale"),
    is_costly=True,
)
def quantized_linear(
    x: Annotated[torch.Tensor, "[T, K >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[N >= 1, L] float8_e4m3fn or uint8"],
    scale: Annotated[torch.Tensor, "[R, C] float32 or bfloat16 or float16"],
    zero_point: Annotated[torch.Tensor | None, "[R, C] uint8"] = None,
    bias: Annotated[torch.Tensor | None, "[N] floating-point"] = None,
    swiglu: bool = False,
    split_k_partials: bool = False,
    row_invariant: bool = True,  # noqa: ARG001 - rows on a CPU always are
) -> torch.Tensor:
    """Multiply rows with a quantised weight, as ``torch.nn.functional.linear`` does with another.

    The weight is ``scale * number`` for float8_e4m3fn, and ``scale * (number - zero_point)`` for
    numbers of four bits. Numbers are exact in the dtype of the rows. Products are added in float32
    and scaled in float32, so that only the result is rounded to that dtype.

    With ``row_invariant``, the bits of a row depend on the row alone: the weight decides into which
    parts the inputs are split, and blocks of 128 inputs are added in one order. Without it, CUDA
    takes what is fastest for the number of rows. More than 256 rows are limited by arithmetic:
    numbers are then converted into memory of their own before. Up to two launches for up to 256
    rows.

    On compute capability 9.0 and above, the weight, its scales and zero points may be read while
    earlier kernels of the stream still run (programmatic dependent launch). Kernels that write them
    must have ended before the call: call ``torch.cuda.synchronize``, or replay the call in a graph.

    Args:
        x: The rows.
        weight: Numbers of float8_e4m3fn, L = K; or numbers of four bits, two per byte, L =
            128 * ceil(K / 256). Byte i of 128 has input i of 256 in its lower bits, and input
            i + 128 in its upper ones. No result depends on the numbers of inputs past K.
        scale: Factors. R is 1 for one of all outputs, ceil(N / 128) for blocks, or N; C is 1 for
            one of all inputs, or ceil(K / 128) for blocks.
        zero_point: Numbers of four bits that stand for 0, of each scale; None for 8, and for
            float8_e4m3fn.
        bias: Added to the products.
        swiglu: As for ``linear``.
        split_k_partials: As for ``linear``.
        row_invariant: Whether the bits of a row depend on the row alone. Rows on a CPU always do.

    Returns:
        The products, [T, N] of x's dtype; with ``swiglu`` [T, N / 2]; partial sums [S, T, N] of
        float32, or of x's dtype if S is 1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = dequantized(weight, scale, zero_point, x.shape[1], wide)
    product = multiply(x.to(wide), matrix, None if bias is None else bias.to(wide)).to(x.dtype)
    return result_of(product, swiglu, split_k_partials)
