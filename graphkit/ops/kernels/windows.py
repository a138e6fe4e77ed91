"""Windows over token ids for CUDA. Contract: ``graphkit.ops.windows``."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["places", "token_stride"])
def rotate_input_ids_kernel(
    input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index, places, token_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request, BLOCK places at a time from the left."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(extend_start_loc + request)
    end = tl.minimum(start + tl.load(extend_seq_lens + request), places)
    start = tl.maximum(start, 0)
    token = tl.load(topk_index + request * token_stride)
    selected = tl.load(select_index + request)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        following = tl.load(input_ids + place + 1, mask=place + 1 < end, other=0)
        # Another thread is about to overwrite what this one has read, or the other way round.
        tl.debug_barrier()
        is_selected = place == selected
        moved = tl.where(is_selected, token.to(following.dtype), following)
        tl.store(input_ids + place, moved, mask=(place + 1 < end) | (is_selected & (place < end)))


def launch_rotate_input_ids(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor,
) -> None:
    """Launch on the current stream; as the op of that name, ``topk_index`` [B] of any stride."""
    if requests := select_index.numel():
        rotate_input_ids_kernel[(requests,)](
            input_ids, extend_start_loc.contiguous(), extend_seq_lens.contiguous(), topk_index,
            select_index.contiguous(), input_ids.numel(), topk_index.stride(0), BLOCK=BLOCK,
        )  # fmt: skip
