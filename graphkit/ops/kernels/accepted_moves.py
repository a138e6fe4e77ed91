"""Moves of the KV of accepted nodes for CUDA. Contract: ``graphkit.ops.accepted_moves``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.accepted_moves import empty_moves
from graphkit.ops.kernels.launch import launch

BLOCK = 128


@triton.jit(do_not_specialize=["entries", "columns", "width"])
def accepted_moves_kernel(
    target, source, accept_index, out_cache_loc, entries, columns, width, BLOCK: tl.constexpr
):
    """BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row = tl.load(accept_index + entry, mask=inside, other=-1)
    front = entry // columns * width + entry % columns
    to = tl.load(out_cache_loc + front, mask=row >= 0, other=0)
    at = tl.load(out_cache_loc + row, mask=row >= 0, other=0)
    tl.store(target + entry, to, mask=inside)
    tl.store(source + entry, at, mask=inside)


def launch_accepted_moves(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``accepted_moves``."""
    target, source = moves = empty_moves(given)
    entries, columns = given.accept_index.numel(), given.accept_index.shape[1]
    launch(
        accepted_moves_kernel, (triton.cdiv(entries, BLOCK),), given, target=target,
        source=source, entries=entries, columns=columns, width=given.num_draft_tokens,
        BLOCK=BLOCK,
    )  # fmt: skip
    return moves
