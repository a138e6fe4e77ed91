"""Windows over token ids for CUDA. Contract: ``graphkit.ops.windows``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

BLOCK = 1024


@triton.jit(do_not_specialize=["size", "token_stride"])
def rotate_input_ids_kernel(
    input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index, size, token_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request, BLOCK ids at a time from the left."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(extend_start_loc + request)
    end = tl.minimum(start + tl.load(extend_seq_lens + request), size)
    start = tl.maximum(start, 0)
    token = tl.load(topk_index + request * token_stride)
    selected = tl.load(select_index + request)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        following = tl.load(input_ids + at + 1, mask=at + 1 < end, other=0)
        # One thread stores where its neighbour loads, so all loads must come first.
        tl.debug_barrier()
        is_selected = at == selected
        moved = tl.where(is_selected, token.to(following.dtype), following)
        tl.store(input_ids + at, moved, mask=(at + 1 < end) | (is_selected & (at < end)))


def launch_rotate_input_ids(args: Any) -> None:
    """Launch ``rotate_input_ids``."""
    launch(
        rotate_input_ids_kernel, (args.select_index.numel(),), args,
        topk_index=args.topk_index, size=args.input_ids.numel(),
        token_stride=args.topk_index.stride(0), BLOCK=BLOCK,
    )  # fmt: skip
