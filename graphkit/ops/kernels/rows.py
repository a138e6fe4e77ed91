"""Rows of tensors for CUDA. Contracts: ``graphkit.ops.rows``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.decoder import column_offsets
from graphkit.ops.kernels.kv_cache import WORDS
from graphkit.ops.kernels.launch import launch, wait_for_kernel_before

MAX_BLOCK = 1024
"""Columns of a program."""


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    out, source, index, rows, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCK of its columns, STRIDE elements apart in the source."""
    wait_for_kernel_before(STARTS_EARLY)
    to = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + to).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), rows - 1)
    value = tl.load(source + row * ROW_STRIDE + column_offsets(column, STRIDE), mask=column < WIDTH)
    tl.store(out + to * WIDTH + column, value, mask=column < WIDTH)


def launch_gather_rows(args: Any) -> torch.Tensor:
    """Launch ``gather_rows``."""
    source, count = args.source, len(args.index)
    out: torch.Tensor = source.new_empty(count, *source.shape[1:])
    # Rows of more dimensions are copied only if their elements are not evenly spaced.
    flat = source[:, None] if source.dim() == 1 else source.flatten(1)
    width = flat.shape[1]
    launch(
        gather_rows_kernel, (count, triton.cdiv(width, MAX_BLOCK)), args, out=_words(out),
        source=_words(flat), rows=len(flat), WIDTH=width, ROW_STRIDE=flat.stride(0),
        STRIDE=flat.stride(1), **_block(width),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def scatter_rows_kernel(
    targets, sources, widths, index, rows, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr
):
    """One program per row and BLOCK columns, for all tensors of the tuples."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(index + row).to(tl.int64)
    is_row = (to >= 0) & (to < rows)
    for each in tl.static_range(len(targets)):
        width = widths[each]
        inside = is_row & (column < width)
        value = tl.load(sources[each] + row * width + column, mask=inside)
        tl.store(targets[each] + to * width + column, value, mask=inside)


def launch_scatter_rows(args: Any) -> None:
    """Launch ``scatter_rows``."""
    count = len(args.index)
    if not count or not args.targets:
        return
    widths = tuple(source[0].numel() for source in args.sources)
    launch(
        scatter_rows_kernel, (count, triton.cdiv(max(widths), MAX_BLOCK)), args,
        targets=tuple(map(_words, args.targets)), widths=widths, rows=len(args.targets[0]),
        sources=tuple(_words(source.contiguous()) for source in args.sources),
        **_block(max(widths)),
    )  # fmt: skip


def _block(width: int) -> dict[str, int]:
    block = min(MAX_BLOCK, triton.next_power_of_2(max(width, 1)))
    return {"BLOCK": block, "num_warps": 4 if block > 256 else 1}


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as integers."""
    return rows.view(WORDS[rows.element_size()])
