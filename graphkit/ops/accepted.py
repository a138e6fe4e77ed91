"""Counts, positions and bonus tokens after a verification.

``num_accepted_drafts`` excludes the bonus token, ``num_accepted_tokens`` includes it; no op here
changes either.

Dimensions: B requests, U unfinished requests, N accepted tokens of all requests, M positions.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.packed import locate, read
from graphkit.ops.registration import register_op


@register_op(
    mutates_args=("seq_lens",),
    fake=lambda given: given.num_accepted_drafts.new_empty(given.num_accepted_drafts.shape),
)
def create_num_accepted_drafts_filter(
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32 or int64"],
    unfinished_index: Annotated[torch.Tensor, "[U] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64, contiguous"],
) -> torch.Tensor:
    """Count the slots that unfinished requests keep, and commit the accepted tokens.

    Args:
        num_accepted_drafts: Accepted tokens per request, bonus token excluded; not changed.
        unfinished_index: Requests that continue; an index outside the batch is ignored.
        seq_lens: Committed tokens; drafts + 1 is added for every request, finished or not.

    Returns:
        drafts + 1 for an unfinished request, 0 for a finished one; [B] of the dtype of
        num_accepted_drafts.
    """
    request = torch.arange(seq_lens.numel(), device=seq_lens.device)
    is_unfinished = (request[:, None] == unfinished_index).any(1)
    num_accepted_tokens = num_accepted_drafts + 1
    seq_lens += num_accepted_tokens
    return torch.where(is_unfinished, num_accepted_tokens, 0)


@register_op(mutates_args=("positions", "bonus_tokens"))
def create_extend_after_decode_spec_info(
    accept_tokens: Annotated[torch.Tensor, "[N] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32 or int64"],
    num_accepted_tokens: Annotated[torch.Tensor, "[B] int32 or int64"],
    positions: Annotated[torch.Tensor, "[M] int32 or int64, contiguous"],
    bonus_tokens: Annotated[torch.Tensor, "[B] int32 or int64, contiguous"],
) -> None:
    """Write the position of each accepted token and the bonus token of each request.

    For DRAFT_EXTEND, whose rows are the accepted tokens alone. Positions behind the last request's
    and the bonus token of a request without accepted tokens keep their values.

    Args:
        accept_tokens: Accepted tokens, bonus tokens included, packed.
        seq_lens: Committed tokens, the accepted ones included.
        num_accepted_tokens: Accepted tokens per request (n), bonus token included.
        positions: Receives seq_lens - n to seq_lens - 1 per request, packed. M is N or more.
        bonus_tokens: Receives the last accepted token of each request.
    """
    if seq_lens.numel() == 0:
        return
    request, column, is_used = locate(num_accepted_tokens, positions.numel())
    position = (seq_lens - num_accepted_tokens)[request] + column
    positions.copy_(torch.where(is_used, position, positions))
    last = num_accepted_tokens.clamp(min=0).cumsum(0) - 1
    bonus_tokens.copy_(read(accept_tokens, (last,), bonus_tokens, num_accepted_tokens > 0))
