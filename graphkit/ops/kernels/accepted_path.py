"""The accepted path for CUDA. Contracts: ``graphkit.ops.accepted_path``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before

TILE = 1024
"""Elements of a program that copies rows."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes to copy rows as, by bytes per element."""
BLOCK = 128
"""Entries of a program that lists moves."""


@triton.jit(do_not_specialize=["rows", "num_draft_tokens", "path_nodes"])
def compact_accepted_to_front_kernel(
    compacted, x, accept_index, rows, num_draft_tokens, path_nodes,
    ROW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_H of their ROW elements per program."""
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row = row < rows
    request, node = row // num_draft_tokens, row % num_draft_tokens
    is_front = is_row & (node < path_nodes)
    accepted = tl.load(accept_index + request * path_nodes + node, mask=is_front, other=0)
    accepted = tl.minimum(tl.maximum(accepted, 0), rows - 1)
    source = tl.where(is_front, accepted, row).to(tl.int64)
    inside = is_row[:, None] & (column < ROW)[None, :]
    elements = tl.load(x + source[:, None] * ROW + column[None, :], mask=inside)
    cells = row.to(tl.int64)[:, None] * ROW + column[None, :]
    tl.store(compacted + cells, elements, mask=inside)


def launch_compact_accepted_to_front(args: Any) -> torch.Tensor:
    """Launch ``compact_accepted_to_front``."""
    x = args.x.contiguous()
    compacted = torch.empty_like(x)
    rows, word = x.shape[0], _WORDS[x.element_size()]
    row = x.numel() // max(rows, 1)
    block_h = min(TILE, triton.next_power_of_2(max(row, 1)))
    block_t = TILE // block_h
    launch(
        compact_accepted_to_front_kernel,
        (triton.cdiv(rows, block_t), triton.cdiv(row, block_h)), args,
        compacted=compacted.view(word), x=x.view(word), rows=rows,
        path_nodes=args.accept_index.shape[1], ROW=row, BLOCK_T=block_t, BLOCK_H=block_h,
    )  # fmt: skip
    return compacted


@triton.jit(do_not_specialize=["entries", "columns", "width"])
def accepted_moves_kernel(
    target, source, accept_index, out_cache_loc, entries, columns, width, BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK entries per program."""
    wait_for_kernel_before(STARTS_EARLY)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row = tl.load(accept_index + entry, mask=inside, other=-1)
    front = entry // columns * width + entry % columns
    to = tl.load(out_cache_loc + front, mask=row >= 0, other=0)
    at = tl.load(out_cache_loc + row, mask=row >= 0, other=0)
    tl.store(target + entry, to, mask=inside)
    tl.store(source + entry, at, mask=inside)


def launch_accepted_moves(args: Any, moves: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Launch ``accepted_moves``."""
    target, source = moves
    entries, columns = args.accept_index.numel(), args.accept_index.shape[1]
    launch(
        accepted_moves_kernel, (triton.cdiv(entries, BLOCK),), args, target=target,
        source=source, entries=entries, columns=columns, width=args.num_draft_tokens,
        BLOCK=BLOCK,
    )  # fmt: skip
