"""Products with weights of the dtype of their rows, and the kinds of results of all products.

Dimensions: T rows, K inputs, N outputs, S partial sums, H heads, C outputs of a head.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.nn import functional

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.decoder import silu_and_mul
from graphkit.ops.registration import register_op

_FAST = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels multiply."""
MOST_ROWS_IN_PARTS = 1024
"""Most rows whose partial sums exist at the same time, in float32. More rows are multiplied in
slices, and their partial sums are reduced."""
MOST_STEP_ROWS = 256
"""Most rows that are multiplied in the parts of few rows without ``row_invariant``. More rows, as
of a prompt, are one product of torch, which writes no partial sums in float32."""
CPU_ROWS = 4
"""Rows of products on a CPU are padded to a multiple of it. MKL 2024.2 and oneDNN 3.12, which torch
2.13 has, add the inputs of a row in another order for fewer rows, and for those left over."""
CPU_TILE = 8
"""As ``CPU_ROWS`` for batches of products (``torch.bmm``). With fewer rows, torch multiplies small
matrices itself."""


def check_result(op: str, args: Any) -> None:
    """Refuse ``swiglu`` with ``split_k_partials``, or over an odd number of outputs."""
    if args.swiglu and args.split_k_partials:
        raise InputError(
            f"{op}: swiglu and split_k_partials are both True, but the gate needs whole sums. Pass "
            "one of them.",
            field="swiglu",
        )
    if args.swiglu and len(args.weight) % 2:
        raise InputError(
            f"{op}: weight is {describe(args.weight)}, expected an even number of rows: the "
            "gate's, then the up projection's.",
            field="weight",
        )


def has_row_invariant_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the rows of ``linear`` have the same bits for any number of rows."""
    if device.type != "cuda":
        return True
    from graphkit.ops.kernels.devices import has_dependent_launch  # imports Triton

    return dtype != torch.float64 and has_dependent_launch(device)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``torch.nn.functional.linear``, with rows on a CPU padded to ``CPU_ROWS``.

    The bits of a row on a CPU then depend on neither the other rows nor their number.

    Shapes:
        x: [..., K]. weight: [N, K]. bias: [N]. Returns [..., N].
    """
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    spare = -len(rows) % CPU_ROWS
    if spare:
        product = functional.linear(functional.pad(rows, (0, 0, 0, spare)), weight, bias)
        product = product[: len(rows)]
    else:
        product = functional.linear(rows, weight, bias)
    return product.view(*x.shape[:-1], len(weight))


def empty_head_products(args: Any) -> torch.Tensor:
    """Allocate the result of ``multiply_heads``, with the heads of a row side by side."""
    heads, count, _ = args.rows.shape
    out: torch.Tensor = args.rows.new_empty(count, heads, args.weight.shape[2])
    return out.transpose(0, 1)


@register_op(fake=empty_head_products, differentiable=True)
def multiply_heads(
    rows: Annotated[torch.Tensor, "[H, T, K >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[H, K, C >= 1] rows.dtype"],
) -> Annotated[torch.Tensor, "[H, T, C] rows.dtype"]:
    """Multiply the rows of each head with the weight of the head, as ``torch.bmm`` does.

    The bits of a row depend on the row alone: on a CPU, and from compute capability 9.0 on. Up to
    64 rows run by a kernel. More rows run by cuBLAS if that has the same bits, which the first
    product of a shape compares. One launch, but for that product.

    Args:
        rows: The rows of each head.
        weight: The weight of each head.

    Returns:
        The products, a transposed view of [T, H, C].
    """
    count = rows.shape[1]
    spare = -count % CPU_TILE if rows.device.type == "cpu" else 0
    if spare:
        rows = functional.pad(rows, (0, 0, 0, spare))
    return torch.bmm(rows, weight)[:, :count].transpose(0, 1).contiguous().transpose(0, 1)


def result_of(product: torch.Tensor, swiglu: bool, split_k_partials: bool) -> torch.Tensor:
    """Return the result of the references of both ops from their product, [T, N]."""
    if swiglu:
        return silu_and_mul(product)
    return product[None] if split_k_partials else product


def empty_result(args: Any, bits: int) -> torch.Tensor:
    """Allocate the result of a product with numbers of so many bits."""
    x, (rows, inputs), outputs = args.x, args.x.shape, len(args.weight)
    if not args.split_k_partials:
        columns = outputs // 2 if args.swiglu else outputs
        return torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    parts = 1
    if x.device.type == "cuda":
        from graphkit.ops.kernels.quantized_linear_config import choose_product  # imports Triton

        row_invariant = getattr(args, "row_invariant", True)
        product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype, row_invariant)
        is_of_torch = bits > 8 and not row_invariant and rows > MOST_STEP_ROWS
        if product is not None and rows <= MOST_ROWS_IN_PARTS and not is_of_torch:
            parts = product.splits
    dtype = x.dtype if parts == 1 else torch.float32
    return torch.empty(parts, rows, outputs, dtype=dtype, device=x.device)


@register_op(
    fake=lambda args: empty_result(args, 8 * args.weight.element_size()),
    check=lambda args: check_result("linear", args),
    differentiable=True,
    stand_in=lambda args: _in_parts(args),
)
def linear(
    x: Annotated[torch.Tensor, "[T, K >= 1] floating-point"],
    weight: Annotated[torch.Tensor, "[N >= 1, K] x.dtype"],
    bias: Annotated[torch.Tensor | None, "[N] x.dtype"] = None,
    swiglu: bool = False,
    split_k_partials: bool = False,
    row_invariant: bool = True,  # noqa: ARG001 - rows on a CPU always are
) -> torch.Tensor:
    """Multiply rows with a weight, as ``torch.nn.functional.linear`` does.

    Products of bfloat16, float16 and float32 are row-invariant on compute capability 9.0: the bits
    of a row do not depend on the number of rows. From 9.0 on, up to 64 rows run by a kernel, which
    already starts, and requests a weight of 16 bits, while the kernel before it runs. More rows run
    by cuBLAS with the same split of the inputs, if that has the same bits. ``choose_product`` of
    ``graphkit.ops.kernels`` has the limits. Other products run by ``torch.nn.functional.linear``,
    and so do more than 256 rows without ``row_invariant``, such as those of a prompt.
    Up to two launches for up to 1,024 rows, but for the first product of a shape, which compares,
    and for a weight whose inputs do not divide into its parts.

    On a CPU the bits of a row depend on the row alone.

    Args:
        x: The rows.
        weight: The weight.
        bias: Added to the products.
        swiglu: Whether to return ``silu_and_mul`` of the products. The weight has the rows of the
            gate, then as many of the up projection.
        split_k_partials: Whether to return the partial sums of a split of the inputs (split-K).
            ``add_rms_norm``, ``rotated_heads`` and ``store_rotated_heads`` reduce them, so that no
            kernel has to before. The rows, the weight and the device decide on their number.
        row_invariant: Whether the bits of a row are independent of the number of rows, also for
            more than 256 rows.

    Returns:
        The products, [T, N] of x's dtype; with ``swiglu`` [T, N / 2]; partial sums [S, T, N] of
        float32, or of x's dtype if S is 1.
    """
    return result_of(multiply(x, weight, bias), swiglu, split_k_partials)


def _in_parts(args: Any) -> torch.Tensor:
    """Return ``linear`` by torch, with as many partial sums as kernels return.

    A forward may keep what it computes from weights once, so that zeros cannot stand in.
    """
    if not args.split_k_partials:
        return result_of(multiply(args.x, args.weight, args.bias), args.swiglu, False)
    parts = empty_result(args, 8 * args.weight.element_size()).zero_()
    parts[0] = multiply(args.x, args.weight, args.bias)
    return parts


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    split_k_partials: bool = False,
    row_invariant: bool = True,
) -> torch.Tensor:
    """Return the products of ``linear``, by the op itself on CUDA without gradients.

    The gradient of the op would run the product again.

    Args:
        x: Rows, [..., K].
        weight: The weight, [N, K].
        bias: Added to the products, [N].
        swiglu: As for ``linear``.
        split_k_partials: As for ``linear``, like the next.
        row_invariant: Whether the bits of a row are independent of the number of rows.

    Returns:
        The products, [..., N]; with ``swiglu`` [..., N / 2]; partial sums [S, ..., N].
    """
    is_fast = x.is_cuda and x.dtype in _FAST and x.dtype == weight.dtype
    if is_fast and not torch.is_grad_enabled():
        rows = x.reshape(-1, x.shape[-1])
        out = linear(rows, weight, bias, swiglu, split_k_partials, row_invariant)
        return out.view(*out.shape[:-2], *x.shape[:-1], out.shape[-1])
    out = multiply(x, weight, bias)
    if swiglu:
        return silu_and_mul(out.view(-1, len(weight))).view(*x.shape[:-1], len(weight) // 2)
    return out[None] if split_k_partials else out
