"""The accepted path for CUDA. Contracts: ``graphkit.ops.accepted_path``."""

import torch
import triton
import triton.language as tl

TILE = 1024
ENTRIES = 1024

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What rows are copied as: their bits, whatever they mean."""


@triton.jit(do_not_specialize=["rows", "num_draft_tokens", "path_nodes"])
def compact_accepted_to_front_kernel(
    compacted, x, accept_index, rows, num_draft_tokens, path_nodes,
    ROW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_H of their ROW elements per program."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row = row < rows
    request, node = row // num_draft_tokens, row % num_draft_tokens
    is_front = is_row & (node < path_nodes)
    accepted = tl.load(accept_index + request * path_nodes + node, mask=is_front, other=0)
    accepted = tl.minimum(tl.maximum(accepted, 0), rows - 1)
    source = tl.where(is_front, accepted, row).to(tl.int64)
    inside = is_row[:, None] & (at < ROW)[None, :]
    elements = tl.load(x + source[:, None] * ROW + at[None, :], mask=inside)
    target = row.to(tl.int64)[:, None] * ROW + at[None, :]
    tl.store(compacted + target, elements, mask=inside)


def launch_compact_accepted_to_front(
    x: torch.Tensor, accept_index: torch.Tensor, num_draft_tokens: int
) -> torch.Tensor:
    """Launch on the current stream; as the op of that name."""
    compacted = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return compacted
    rows, word = x.shape[0], _WORDS[x.element_size()]
    row = x.numel() // rows
    block_h = min(TILE, triton.next_power_of_2(row))
    block_t = TILE // block_h
    compact_accepted_to_front_kernel[(triton.cdiv(rows, block_t), triton.cdiv(row, block_h))](
        compacted.view(word), x.contiguous().view(word), accept_index.contiguous(),
        rows, num_draft_tokens, accept_index.shape[1],
        ROW=row, BLOCK_T=block_t, BLOCK_H=block_h,
    )  # fmt: skip
    return compacted


@triton.jit(do_not_specialize=["entries", "slots", "places"])
def fill_accepted_out_cache_loc_kernel(
    accept_index, out_cache_loc, accepted_out_cache_loc, entries, slots, places,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """ENTRIES entries per program, which counts the accepted ones before them for itself."""
    each = tl.arange(0, ENTRIES)
    begin = tl.program_id(0) * ENTRIES
    before = tl.zeros([ENTRIES], tl.int32)
    for first in range(0, begin, ENTRIES):
        before += (tl.load(accept_index + first + each) >= 0).to(tl.int32)

    at = begin + each
    row = tl.load(accept_index + at, mask=at < entries, other=-1)
    place = tl.sum(before, 0) + tl.cumsum((row >= 0).to(tl.int32), 0) - 1
    filled = (row >= 0) & (row < slots) & (place < places)
    slot = tl.load(out_cache_loc + row, mask=filled)
    tl.store(accepted_out_cache_loc + place, slot, mask=filled)


def launch_fill_accepted_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accepted_out_cache_loc: torch.Tensor
) -> None:
    """Launch on the current stream; as the op of that name, ``accept_index`` flat."""
    if entries := accept_index.numel():
        fill_accepted_out_cache_loc_kernel[(triton.cdiv(entries, ENTRIES),)](
            accept_index.contiguous(), out_cache_loc.contiguous(), accepted_out_cache_loc,
            entries, out_cache_loc.numel(), accepted_out_cache_loc.numel(), ENTRIES=ENTRIES,
        )  # fmt: skip
