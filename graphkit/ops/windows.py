"""Windows over packed token ids.

Dimensions: B requests, T tokens, K topk.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.registration import register_op


@register_op(mutates_args=("input_ids",))
def rotate_input_ids(
    input_ids: Annotated[torch.Tensor, "[T] int32 or int64, contiguous"],
    extend_start_loc: Annotated[torch.Tensor, "[B] int32 or int64"],
    extend_seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    topk_index: Annotated[torch.Tensor, "[B] or [B, K] int32 or int64"],
    select_index: Annotated[torch.Tensor, "[B] int32 or int64"],
) -> None:
    """Move each request's window of token ids left by one, then insert its new token.

    The last id of a window also stays in place, unless ``select_index`` names its position.
    Contract of SGLang's function of this name.

    Args:
        input_ids: Token ids, changed in place.
        extend_start_loc: First index of each request's window. Windows must not overlap; indices
            outside ``input_ids`` are skipped.
        extend_seq_lens: Tokens in the window, 0 or more.
        topk_index: New token per request, or the K best, of which the first is taken.
        select_index: Index of the new token. One outside the request's own window is skipped, so
            that the 0 of a pad row does not change the first live request.
    """
    tokens = topk_index[:, 0] if topk_index.dim() == 2 else topk_index
    size = input_ids.numel()
    begin = extend_start_loc.clamp(0, size).long()
    end = (extend_start_loc + extend_seq_lens).clamp(0, size).long()
    # Between the begin and the last index of a window the running sum is 1: those ids move.
    steps = torch.zeros(size + 1, dtype=torch.int64, device=input_ids.device)
    ones = torch.ones_like(begin)
    steps.index_add_(0, begin, ones).index_add_(0, torch.maximum(end - 1, begin), -ones)
    moves = steps.cumsum(0)[:-1] > 0
    rotated = torch.where(moves, input_ids.roll(-1), input_ids)

    is_own = (select_index >= begin) & (select_index < end)
    longer = torch.cat([rotated, rotated.new_zeros(1)])  # one more entry for skipped tokens
    longer[torch.where(is_own, select_index, size)] = tokens.to(input_ids.dtype)
    input_ids.copy_(longer[:-1])
