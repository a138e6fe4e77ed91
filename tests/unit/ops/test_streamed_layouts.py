"""Shared memory is read in the layouts in which descriptors write it, as Triton computes them."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import triton
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language import NVMMASharedLayout

from graphkit.ops.kernels.streamed_linear import _layout_of_block
from graphkit.ops.kernels.streamed_tile import layout_of_lines, row_at

pytestmark = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="Triton 3.6 aborts on layouts of shared memory",
)


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
@pytest.mark.parametrize("is_spread", [False, True])
def test_rows_are_read_where_their_descriptor_writes_them(rows, lines, is_spread):
    written = addresses(NVMMASharedLayout(128, 16, 5), [1, lines, 2, rows, 64])
    read = addresses(_layout_of_block(lines, rows, is_spread), [lines, rows, 128])
    assert [place(each, rows, is_spread) for each in written] == read


@pytest.mark.parametrize("rows", [8, 16, 32])
def test_eight_bytes_of_the_rows_of_half_a_warp_are_in_different_banks(rows):
    """A thread takes four inputs of a row; four threads have those that follow one another."""
    shape = [1, rows, 128]
    bases = addresses(_layout_of_block(1, rows, True), shape)
    address = {0: 0}
    for bit, base in enumerate(bases):
        address |= {place ^ base: at | 1 << bit for place, at in address.items()}
    for first, group in product(range(0, rows, 4), range(8)):
        elements = [(first + row) * 128 + group * 16 + 4 * t for row in range(4) for t in range(4)]
        assert len({address[element] * 2 // 8 % 16 for element in elements}) == 16


def place(flat, rows, is_spread=False):
    """Return the place in [lines, rows, 128] of one in [lines, 2, rows, 64]."""
    others, column = divmod(flat, 64)
    others, row = divmod(others, rows)
    line, half = divmod(others, 2)
    if is_spread:
        row = [row_at.fn(each) for each in range(rows)].index(row)
    return (line * rows + row) * 128 + half * 64 + column


@pytest.mark.parametrize("halves", [1, 2])
def test_a_warpgroup_reads_rows_where_their_descriptor_writes_them(halves):
    written = addresses(NVMMASharedLayout(128, 16, 5), [1, 1, halves, 64, 64])
    read = addresses(NVMMASharedLayout(128, 16, 2), [64, 64 * halves])
    assert (written if halves == 1 else [place(each, 64) for each in written]) == read


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("outputs", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("lines", "width"), [(1, 128), (2, 128), (4, 128), (None, 128), (None, 64)]
)
def test_lines_are_read_where_their_descriptor_writes_them(lines, width, outputs, is_gated):
    projections, count = 1 + is_gated, lines or 1
    box = [projections, 1, outputs // projections, count, width]
    written = addresses(NVMMASharedLayout(width, 8, 5), box)
    layout = layout_of_lines(lines, outputs, width, is_gated)
    read = addresses(layout, [count, outputs, width] if lines else [outputs, width])
    assert [output_place(each, box) for each in written] == read


def output_place(flat, box):
    """Return the place in [lines, outputs, bytes] of one in [projections, 1, own, lines, bytes]."""
    projections, _, own, lines, width = box
    others, byte = divmod(flat, width)
    others, line = divmod(others, lines)
    projection, output = divmod(others, own)
    if projections > 1:
        output = output // 8 * 16 + projection * 8 + output % 8
    return (line * projections * own + output) * width + byte
