"""Products of few rows for CUDA. Contract: ``graphkit.ops.linear``."""

from types import SimpleNamespace
from typing import Any

import torch

from graphkit.ops.kernels.quantized_linear import finished, launch_product
from graphkit.ops.kernels.quantized_linear_config import Product, choose_product
from graphkit.ops.kernels.streamed_config import StreamedProduct
from graphkit.ops.kernels.streamed_launch import launch_streamed

MOST_PUSHED_WORDS = 1 << 17
"""Most words that a product pushes to each rank, 1 MiB with their stamps. The sum over ranks pushes
the words of more rows, after it has added the parts, which are several times as many."""


def launch_pushed_linear(x: torch.Tensor, weight: torch.Tensor, memory: Any) -> torch.Tensor | None:
    """Return the parts of a product, [S, T, N], which also go to the other ranks.

    ``launch_pushed_add_rms_norm`` reads those of all ranks. The result is ``None`` if the product
    has one part, does not stream, or has more words than ``MOST_PUSHED_WORDS``.

    Args:
        x: Rows, [T, K].
        weight: Bfloat16 or float16, [N, K].
        memory: The memory of the ranks, a ``PushMemory``.
    """
    (rows, inputs), outputs, bits = x.shape, len(weight), 8 * weight.element_size()
    product = choose_product(rows, inputs, outputs, bits, x.device, x.dtype)
    if not isinstance(product, StreamedProduct) or product.splits == 1:
        return None
    words = rows * product.splits * outputs
    if words > MOST_PUSHED_WORDS or not memory.holds(rows * product.splits, outputs):
        return None
    parts: torch.Tensor = x.new_empty(product.splits, rows, outputs, dtype=torch.float32)
    args = SimpleNamespace(x=x, weight=weight, bias=None)
    described = {
        "weight": weight.contiguous(),
        "N": outputs,
        "K": inputs,
        "ROW": inputs,
        "SCALE_ROWS": 0,
    }
    launch_streamed(args, product, parts, x.contiguous(), False, described, memory.pushed())
    return parts


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
