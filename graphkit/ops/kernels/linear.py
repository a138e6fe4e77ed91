"""Products with weights of 16 bits for CUDA. Contract: ``graphkit.ops.linear``.

The parts of a weight decide the bits of a row. More than ``FEW_PLAIN_ROWS`` rows are multiplied by
cuBLAS, part by part, where it adds the inputs of a part in order, as the kernels do.
"""

from typing import Any

import torch
from torch.nn import functional

from graphkit.ops.kernels.quantized_linear import finished, joined, launch_product
from graphkit.ops.kernels.quantized_linear_config import Product, choose_product
from graphkit.ops.kernels.streamed_plain_config import FEW_PLAIN_ROWS
from graphkit.ops.linear import MOST_ROWS_IN_PARTS, multiply

_adds_in_order: dict[tuple[Any, ...], bool] = {}
"""Whether cuBLAS has the bits of the kernels, by parts, shapes, dtype and device of a product."""


def launch_linear(args: Any, product: Product | None = None) -> torch.Tensor:
    """Launch ``linear``, with ``choose_product`` by default."""
    x, weight = args.x, args.weight
    (rows, inputs), outputs = x.shape, len(weight)
    if product is None and weight.is_contiguous():
        bits = 8 * weight.element_size()
        product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype)
        if product and product.splits > 1 and rows > MOST_ROWS_IN_PARTS:
            sliced = args._replace(split_k_partials=False)
            slices = x.split(MOST_ROWS_IN_PARTS)
            out = torch.cat([launch_linear(sliced._replace(x=rows)) for rows in slices])
            return out[None] if args.split_k_partials else out
        if product and rows > FEW_PLAIN_ROWS and _cublas_adds_in_order(args, product):
            return joined(args, _parts_by_cublas(args, product.splits))
    if product is None:
        return finished(args, multiply(x, weight, args.bias))
    return launch_product(
        args, product, x.contiguous(), weight=weight.contiguous(), N=outputs, K=inputs,
        ROW=inputs, IS_PACKED=False, scale=None, zero_point=None, SCALE_ROWS=0, SCALE_COLUMNS=0,
    )  # fmt: skip


def _parts_by_cublas(args: Any, splits: int) -> torch.Tensor:
    """Return the sums of each part of the inputs, [S, T, N], with the bias in the first."""
    x, weight, bias = args.x, args.weight, args.bias
    if splits == 1:
        return functional.linear(x, weight, bias)[None]
    row_parts = x.unflatten(1, (splits, -1)).transpose(0, 1)
    weight_parts = weight.unflatten(1, (splits, -1)).permute(1, 2, 0)
    parts = torch.bmm(row_parts, weight_parts, out_dtype=torch.float32)
    if bias is not None:
        parts[0] += bias
    return parts


def _cublas_adds_in_order(args: Any, product: Product) -> bool:
    """Return whether ``_parts_by_cublas`` has the bits of the kernels.

    It is measured once for each shape and outside of captures, on random rows, of which every
    tile of cuBLAS has at least one. cuBLAS of CUDA 13.0 on an H200 has them for all parts that the
    kernels choose; it has not where it splits a part once more.
    """
    x, weight, bias = args.x, args.weight, args.bias
    key = (product.splits, x.shape, weight.shape, x.dtype, bias is None, x.device)
    if key not in _adds_in_order:
        can_measure = x.is_cuda and not torch.cuda.is_current_stream_capturing()
        if not can_measure or x.shape[1] % product.splits:
            return False
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        every = len(x) // FEW_PLAIN_ROWS
        sums = args._replace(x=rows[::every], swiglu=False, split_k_partials=True)
        parts = _parts_by_cublas(args._replace(x=rows), product.splits)[:, ::every]
        _adds_in_order[key] = torch.equal(launch_linear(sums, product), parts)
    return _adds_in_order[key]
