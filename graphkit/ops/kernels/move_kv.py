"""The move within a KV cache for CUDA. Contract: ``graphkit.ops.move_kv``."""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["slots"])
def move_kv_kernel(
    table, scratch, tgt_loc, src_loc, slots, scratch_stride,
    WORD: tl.constexpr, BLOCK: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """One program per pair, buffer and BLOCK words: source to scratch, or scratch to target."""
    pair = tl.program_id(0).to(tl.int64)
    buffer = table + tl.program_id(1) * 3
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(src_loc + pair)
    target = tl.load(tgt_loc + pair)
    words = tl.load(buffer + 1) // WORD
    inside = (source >= 0) & (source < slots) & (target >= 0) & (target < slots) & (column < words)
    rows = tl.load(buffer).to(tl.pointer_type(scratch.dtype.element_ty))
    kept = scratch + pair * scratch_stride + tl.load(buffer + 2) // WORD + column
    if SCATTER:
        tl.store(rows + target * words + column, tl.load(kept, mask=inside), mask=inside)
    else:
        tl.store(kept, tl.load(rows + source * words + column, mask=inside), mask=inside)


def launch_move_kv(given: Any) -> None:
    """Launch ``move_kv``."""
    pairs = given.tgt_loc.numel()
    sizes = [buffer[0].nbytes for buffer in given.buffers if buffer.shape[0]]
    if pairs == 0 or not any(sizes):
        return
    word = gcd(8, *sizes)
    stride, words = sum(sizes) // word, max(sizes) // word
    block = min(1024, triton.next_power_of_2(words))
    scratch = torch.empty(pairs * stride, dtype=_WORDS[word], device=given.table.device)
    for scatter in (False, True):
        launch(
            move_kv_kernel, (pairs, len(given.buffers), triton.cdiv(words, block)), given,
            scratch=scratch, slots=given.buffers[0].shape[0], scratch_stride=stride,
            WORD=word, BLOCK=block, SCATTER=scatter, num_warps=4 if block > 256 else 1,
        )  # fmt: skip
