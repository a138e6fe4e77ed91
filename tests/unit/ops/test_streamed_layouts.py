"""Shared memory is read in the layouts in which descriptors write it, as Triton computes them."""

from __future__ import annotations

from math import prod

import pytest
import triton
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language import NVMMASharedLayout, SwizzledSharedLayout

from graphkit.ops.kernels.streamed_linear import _layout_of_block

pytestmark = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="Triton 3.6 aborts on layouts of shared memory",
)
BYTE = SwizzledSharedLayout(16, 1, 8, [2, 1, 0])
"""Layout of lines of a weight in ``streamed_linear_kernel``."""


def addresses(layout, shape):
    """Return where each power of two of the address of an element is in a tensor, flattened."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    linear = layout
    if not hasattr(layout, "offset_bases"):
        linear = builder.to_linear_layout(layout._to_ir(builder), shape)
    return [
        sum(each * stride for each, stride in zip(basis, strides, strict=True))
        for basis in linear.offset_bases
    ]


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("lines", [1, 2, 4])
def test_rows_are_read_where_their_descriptor_writes_them(rows, lines):
    written = addresses(NVMMASharedLayout(128, 16, 5), [1, lines, 2, rows, 64])
    read = addresses(_layout_of_block(lines, rows), [lines, rows, 128])
    assert [place(each, rows) for each in written] == read


def place(flat, rows):
    """Return the place in [lines, rows, 128] of one in [lines, 2, rows, 64]."""
    others, column = divmod(flat, 64)
    others, row = divmod(others, rows)
    line, half = divmod(others, 2)
    return (line * rows + row) * 128 + half * 64 + column


@pytest.mark.parametrize("halves", [1, 2])
def test_a_warpgroup_reads_rows_where_their_descriptor_writes_them(halves):
    written = addresses(NVMMASharedLayout(128, 16, 5), [1, 1, halves, 64, 64])
    read = addresses(NVMMASharedLayout(128, 16, 2), [64, 64 * halves])
    assert (written if halves == 1 else [place(each, 64) for each in written]) == read


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("outputs", [64, 128])
def test_a_warpgroup_reads_lines_where_their_descriptor_writes_them(outputs, pieces):
    width = 128 // pieces
    written = addresses(NVMMASharedLayout(width, 8, 5), [1, outputs // 16, 2, 8, width])
    bytes_ = SwizzledSharedLayout(16, pieces, 8 // pieces, [1, 0])
    assert written == addresses(bytes_, [outputs, width])


@pytest.mark.parametrize("outputs", [32, 64, 128, 256])
@pytest.mark.parametrize("lines", [1, 2, 4])
def test_lines_are_read_where_their_descriptor_writes_them(outputs, lines):
    written = addresses(NVMMASharedLayout(128, 8, 5), [lines, outputs // 16, 2, 8, 128])
    assert written == addresses(BYTE, [lines, outputs, 128])
