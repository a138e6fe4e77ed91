"""Counts, positions and bonus tokens after a verification.

num_accepted_drafts leaves the bonus token out, num_accepted_tokens counts it; no op here changes
either. Suffixes: B requests, U unfinished requests, N accepted tokens of all requests.
"""

# ruff: noqa: ARG001 - a fake kernel has its op's signature
from __future__ import annotations

from typing import Any

import torch

from graphkit.ops.packed import find_places, read
from graphkit.ops.slot_arguments import Demands

_FILTER = Demands(
    "create_num_accepted_drafts_filter",
    num_accepted_drafts="B",
    unfinished_index="U",
    seq_lens="B!",
)


@torch.library.custom_op(
    "graphkit::create_num_accepted_drafts_filter", mutates_args=("seq_lens",), device_types="cpu"
)
def create_num_accepted_drafts_filter(
    num_accepted_drafts: torch.Tensor, unfinished_index: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Count the slots that unfinished requests keep, and commit this step's tokens.

    One launch on the current stream; never synchronises, may be captured.

    Args:
        num_accepted_drafts: Accepted tokens per request, bonus excluded; not changed.
        unfinished_index: Which requests go on; an index outside the batch names none.
        seq_lens: Committed tokens; drafts + 1 is added to every request's, finished or not.

    Returns:
        drafts + 1 for an unfinished request, 0 for a finished one.

    Shapes:
        num_accepted_drafts: [B] int32. unfinished_index: [U] int64. seq_lens: [B] contiguous int32.
        Returns [B] like num_accepted_drafts.
        Here and in the other ops of this module, every tensor may be int32 or int64.

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    _FILTER.check(num_accepted_drafts, unfinished_index, seq_lens)
    request = torch.arange(seq_lens.numel(), device=seq_lens.device)
    is_unfinished = (request[:, None] == unfinished_index).any(1)
    num_accepted_tokens = num_accepted_drafts + 1
    seq_lens += num_accepted_tokens
    return torch.where(is_unfinished, num_accepted_tokens, 0)


@create_num_accepted_drafts_filter.register_fake
def _(
    num_accepted_drafts: torch.Tensor, unfinished_index: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    return num_accepted_drafts.new_empty(num_accepted_drafts.shape)


@create_num_accepted_drafts_filter.register_kernel("cuda")
def _(*arguments: Any) -> torch.Tensor:
    from graphkit.ops.kernels.accepted import launch_create_num_accepted_drafts_filter

    _FILTER.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        return launch_create_num_accepted_drafts_filter(*arguments)


_SPEC_INFO = Demands(
    "create_extend_after_decode_spec_info",
    accept_tokens="N",
    seq_lens="B",
    num_accepted_tokens="B",
    positions="places!",
    bonus_tokens="B!",
)


@torch.library.custom_op(
    "graphkit::create_extend_after_decode_spec_info",
    mutates_args=("positions", "bonus_tokens"),
    device_types="cpu",
)
def create_extend_after_decode_spec_info(
    accept_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    positions: torch.Tensor,
    bonus_tokens: torch.Tensor,
) -> None:
    """Give each accepted token its position, and each request its bonus token.

    For the first generation's draft-extend, whose rows are the accepted tokens alone. One launch on
    the current stream; never synchronises, may be captured. Places past the last request's, and the
    bonus of a request without accepted tokens, are left as they are.

    Args:
        accept_tokens: Accepted tokens, bonus included, packed.
        seq_lens: Committed tokens, these included.
        num_accepted_tokens: Accepted tokens per request (n), bonus included.
        positions: Gets seq - n to seq - 1 per request, packed.
        bonus_tokens: Gets the last accepted token of each request.

    Shapes:
        accept_tokens: [N] int64. seq_lens, num_accepted_tokens: [B] int32.
        positions: [N] or longer, contiguous int64. bonus_tokens: [B] contiguous int64.

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    _SPEC_INFO.check(accept_tokens, seq_lens, num_accepted_tokens, positions, bonus_tokens)
    if seq_lens.numel() == 0:
        return
    request, column, is_used = find_places(num_accepted_tokens, positions.numel())
    position = (seq_lens - num_accepted_tokens)[request] + column
    positions.copy_(torch.where(is_used, position, positions))
    last = num_accepted_tokens.clamp(min=0).cumsum(0) - 1
    bonus_tokens.copy_(read(accept_tokens, (last,), bonus_tokens, num_accepted_tokens > 0))


@create_extend_after_decode_spec_info.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.accepted import launch_create_extend_after_decode_spec_info

    _SPEC_INFO.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        launch_create_extend_after_decode_spec_info(*arguments)


_BONUS = Demands(
    "fill_bonus_tokens",
    accept_tokens="B*stride",
    num_accepted_tokens="B",
    bonus_tokens="B!",
    stride="stride",
)


@torch.library.custom_op(
    "graphkit::fill_bonus_tokens", mutates_args=("bonus_tokens",), device_types="cpu"
)
def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    stride: int,
) -> None:
    """Take the last accepted token of each request: accept_tokens[b * stride + n - 1].

    One launch on the current stream; never synchronises, may be captured. A request whose n is not
    1 to stride is left as it is.

    Args:
        accept_tokens: predict[accept_index]: ``stride`` tokens per request, n of them accepted.
        num_accepted_tokens: Accepted tokens per request (n), bonus included; not changed.
        bonus_tokens: Gets the tokens.
        stride: accept_index.shape[1], which is num_steps + 1. Not num_draft_tokens: the two agree
            for topk == 1 only, and a wrong stride is right for the first request still.

    Shapes:
        accept_tokens: [B * stride] or [B, stride] int32 or int64.
        num_accepted_tokens: [B] int32. bonus_tokens: [B] contiguous int64.

    Raises:
        InputError: A shape, dtype, device or number does not fit.
    """
    tokens = accept_tokens.flatten()
    _BONUS.check(tokens, num_accepted_tokens, bonus_tokens, stride)
    request = torch.arange(bonus_tokens.numel(), device=tokens.device)
    index = (request, num_accepted_tokens - 1)
    bonus_tokens.copy_(read(tokens.view(-1, stride), index, bonus_tokens))


@fill_bonus_tokens.register_kernel("cuda")
def _(accept_tokens: torch.Tensor, *others: Any) -> None:
    from graphkit.ops.kernels.accepted import launch_fill_bonus_tokens

    tokens = accept_tokens.flatten()
    _BONUS.check(tokens, *others)
    with torch.cuda.device(tokens.device):
        launch_fill_bonus_tokens(tokens, *others)


@create_extend_after_decode_spec_info.register_fake
@fill_bonus_tokens.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""
