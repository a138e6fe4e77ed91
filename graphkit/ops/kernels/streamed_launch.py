"""Launches of the kernels that stream a weight through shared memory."""

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.quantized_linear_config import grid_of
from graphkit.ops.kernels.quantized_numbers import nibble_ptx
from graphkit.ops.kernels.streamed_linear import streamed_linear_kernel
from graphkit.ops.kernels.streamed_linear_config import groups_of_part, pieces_of_line
from graphkit.ops.kernels.streamed_plain import streamed_plain_kernel
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.kernels.streamed_warpgroup import streamed_warpgroup_kernel
from graphkit.ops.quantized_layout import BLOCK

WARPGROUP_REGISTERS = {(8, 1): 128, (4, 1): 128, (8, 2): 168}
"""Most registers of a thread of ``streamed_warpgroup_kernel``, by the bits of a number and the
number of sums: two programs of two warpgroups then share a multiprocessor, or three of one. Other
numbers of sums belong to weights of one program for each multiprocessor."""
LINE_BYTES = 128
"""Bytes of a line of an output, the most that a descriptor swizzles."""


def launch_streamed(
    args: Any, product: StreamedProduct, parts: torch.Tensor, x: torch.Tensor, is_gated: bool,
    weight: dict[str, Any],
) -> None:  # fmt: skip
    """Write the parts of a product.

    Args:
        args: Arguments of the op.
        product: How the launch divides its work.
        parts: Results, [splits, T, N], or [1, T, N / 2] if gated.
        x: The rows, [T, K], contiguous.
        is_gated: Whether the kernel applies the gate.
        weight: As in ``launch_product``.
    """
    if not len(x):
        return  # a descriptor may not have an empty dimension (Triton 3.6.0 and 3.7.1)
    numbers = weight["weight"]
    lines = weight["ROW"] * numbers.element_size() // LINE_BYTES
    steps = lines // product.splits // product.lines
    is_plain = weight["SCALE_ROWS"] == 0
    read_early = [args.weight] if is_plain else [args.weight, args.scale, args.zero_point]
    are_in_place = all(each is None or each.is_contiguous() for each in read_early)
    options: dict[str, Any] = {} if product.by_warpgroups else {"LINES": product.lines}
    if not is_plain and not product.by_warpgroups:
        options["IN_ORDER"] = product.in_order
    if not are_in_place or numbers.data_ptr() % 16:
        options["STARTS_EARLY"] = False  # the kernels before write copies of them
    x, numbers = _aligned(x), _aligned(numbers)
    if is_plain:
        kernel: Any = streamed_plain_kernel
        stages = max(2, min(product.num_stages, steps))
        options |= {"x": x, "weight": numbers, "K": weight["K"]}
    else:
        kernel, bytes_of_thread, bits = streamed_linear_kernel, 4, 4 if weight["IS_PACKED"] else 8
        if product.by_warpgroups:
            kernel, bytes_of_thread = streamed_warpgroup_kernel, 2
            options |= {"SUMS": product.sums}
            options |= {"maxnreg": WARPGROUP_REGISTERS.get((bits, product.sums), 255)}
        pieces = pieces_of_line(product.by_warpgroups, bits)
        stages = min(product.num_stages, steps * pieces + 1)
        # Rows have many bytes compared with numbers of four bits. They are requested before the
        # weight of the stages that are not in flight yet.
        early = stages - 1 if bits == 8 else min(product.in_flight, stages - 1)
        low, high = None, None
        if bits == 4:
            low, high = nibble_ptx(x.dtype, bytes_of_thread, args.zero_point is not None)
        options |= {
            "x": rows_descriptor(x, product, weight["K"] // lines, pieces),
            "weight": weight_descriptor(numbers, product, is_gated, pieces),
            "BITS": bits, "LOW": low, "HIGH": high, "EARLY": early,
            "SCALES_BLOCKS": weight["SCALE_COLUMNS"] > 1
            or (product.in_order and weight["SCALES_BLOCKS"]),
            "GROUPS": groups_of_part(weight["K"], product.splits),
            "SCALE_ROWS": weight["SCALE_ROWS"], "SCALE_COLUMNS": weight["SCALE_COLUMNS"],
        }  # fmt: skip
    launch(
        kernel, grid_of(product, len(x), weight["N"]), args, out=parts, rows=len(x), N=weight["N"],
        STEPS=steps, STAGES=stages, OUTPUTS=product.outputs,
        BLOCK_N=product.padded_outputs, BLOCK_T=product.rows, IS_GATED=is_gated,
        WARPS=product.num_warps, num_warps=product.num_warps, IN_FLIGHT=product.in_flight,
        **options,
    )  # fmt: skip


def weight_descriptor(
    numbers: torch.Tensor, product: StreamedProduct, is_gated: bool, pieces: int
) -> TensorDescriptor:
    """Return a descriptor of a weight by projections, programs, outputs, lines and bytes.

    A gated product has two projections. A box has the lines of a step, or a piece of a line, for
    the outputs of a program, padded. Outputs behind the last of a program read as zeros, without
    access to memory.

    Args:
        numbers: The weight, bytes, [N, ROW].
        product: How the launch divides its work.
        is_gated: Whether the kernel applies the gate.
        pieces: Pieces of a line.
    """
    (outputs, row), projections = numbers.shape, 1 + is_gated
    own, width = product.outputs // projections, LINE_BYTES // pieces
    return TensorDescriptor(
        numbers,
        shape=[projections, outputs // product.outputs, own, row // LINE_BYTES, LINE_BYTES],
        strides=[outputs // projections * row, own * row, row, LINE_BYTES, 1],
        block_shape=[projections, 1, product.padded_outputs // projections, product.lines, width],
        layout=NVMMASharedLayout(width, 8, 5),
    )  # fmt: skip


def rows_descriptor(
    x: torch.Tensor, product: StreamedProduct, inputs: int, pieces: int
) -> TensorDescriptor:
    """Return a descriptor of rows by blocks of a line, lines, two halves, rows and 64 inputs.

    A box has the inputs of a stage. Rows behind the last read as zeros.

    Args:
        x: The rows, [T, K].
        product: How the launch divides its work.
        inputs: Inputs of a line.
        pieces: Pieces of a line, 1 or 2.
    """
    (count, width), blocks, half = x.shape, inputs // BLOCK, BLOCK // 2
    return TensorDescriptor(
        x, shape=[blocks, width // inputs, 2, count, half],
        strides=[BLOCK, inputs, half, width, 1],
        block_shape=[blocks, product.lines, 2 // pieces, product.rows, half],
        layout=NVMMASharedLayout(2 * half, 8 * x.element_size(), 5),
    )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that starts at a multiple of 16 bytes, which copies of 16 bytes need."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
