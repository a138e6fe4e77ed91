"""Products of few rows for CUDA. Contract: ``graphkit.ops.linear``."""

from typing import Any

import torch

from graphkit.ops.kernels.quantized_linear import finished, launch_product
from graphkit.ops.kernels.quantized_linear_config import Product, choose_product


def launch_linear(args: Any, product: Product | None = None) -> torch.Tensor:
    """Launch ``linear``, with ``choose_product`` by default."""
    x, weight, bias = args.x, args.weight, args.bias
    (rows, inputs), outputs = x.shape, len(weight)
    if product is None and weight.is_contiguous():
        bits = 8 * weight.element_size()
        product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype)
    if product is None:
        return finished(args, torch.nn.functional.linear(x, weight, bias))
    return launch_product(
        args, product, x.contiguous(), weight=weight.contiguous(), N=outputs, K=inputs,
        ROW=inputs, IS_PACKED=False, scale=None, zero_point=None, SCALE_ROWS=0, SCALE_COLUMNS=0,
    )  # fmt: skip
