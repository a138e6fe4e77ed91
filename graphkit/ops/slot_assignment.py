"""Hand the slots of ``req_to_token`` to the rows of a batch.

Suffixes: B requests, K topk, S num_steps, N rows that are extended.
"""

from __future__ import annotations

from typing import Any

import torch

from graphkit.ops.packed import find_places, read
from graphkit.ops.slot_arguments import Demands

_EXTEND = Demands(
    "assign_extend_cache_locs",
    req_pool_indices="B",
    req_to_token="rows context",
    start_offset="B",
    end_offset="B",
    out_cache_loc="N!",
)


@torch.library.custom_op(
    "graphkit::assign_extend_cache_locs", mutates_args=("out_cache_loc",), device_types="cpu"
)
def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """Pack the slots ``req_to_token[row of b, start:end]`` of every request into out_cache_loc.

    One launch on the current stream; never synchronises, may be captured. Places past the last
    request's, and those whose slot would lie outside the table, are left as they are.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        start_offset: First position to take.
        end_offset: The position after the last; at or before the first means none.
        out_cache_loc: Gets the slots; request b's begin at sum(end - start) of those before it.

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] int32.
        start_offset, end_offset: [B] int32. out_cache_loc: [N], any N, contiguous int64.
        Here and in the other op of this module, every tensor may be int32 or int64.

    Raises:
        InputError: A shape, dtype or device does not fit.
    """
    _EXTEND.check(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)
    if req_pool_indices.numel() == 0:
        return
    request, column, is_used = find_places(end_offset - start_offset, out_cache_loc.numel())
    token = (req_pool_indices[request], start_offset[request] + column)
    out_cache_loc.copy_(read(req_to_token, token, out_cache_loc, is_used))


@assign_extend_cache_locs.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.slot_assignment import launch_assign_extend_cache_locs

    _EXTEND.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        launch_assign_extend_cache_locs(*arguments)


_DRAFT = Demands(
    "assign_draft_cache_locs_contiguous",
    req_pool_indices="B",
    req_to_token="rows context",
    seq_lens="B",
    out_cache_loc="B*K*S!",
    topk="K",
    num_steps="S",
)


@torch.library.custom_op(
    "graphkit::assign_draft_cache_locs_contiguous",
    mutates_args=("out_cache_loc",),
    device_types="cpu",
)
def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_steps: int,
) -> None:
    """Take the K * S slots after each request's committed tokens as those of its draft tokens.

    A draft runner reads them as [B, K, S]. One launch on the current stream; never synchronises,
    may be captured. A place whose slot would lie outside the table is left as it is.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        seq_lens: Committed tokens.
        out_cache_loc: Gets the slots ``req_to_token[row of b, seq : seq + K * S]`` at b * K * S.
        topk: Branches (K).
        num_steps: Draft tokens per branch (S).

    Shapes:
        req_pool_indices: [B] int64. req_to_token: [rows, context] int32. seq_lens: [B] int32.
        out_cache_loc: [B * K * S] contiguous int64.

    Raises:
        InputError: A shape, dtype, device or number does not fit.
    """
    _DRAFT.check(req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_steps)
    draft = torch.arange(topk * num_steps, device=seq_lens.device)
    token = (req_pool_indices[:, None], seq_lens[:, None] + draft)
    slots = out_cache_loc.view(-1, topk * num_steps)
    slots.copy_(read(req_to_token, token, slots))


@assign_draft_cache_locs_contiguous.register_kernel("cuda")
def _(*arguments: Any) -> None:
    from graphkit.ops.kernels.slot_assignment import launch_assign_draft_cache_locs_contiguous

    _DRAFT.check(*arguments)
    with torch.cuda.device(arguments[0].device):
        launch_assign_draft_cache_locs_contiguous(*arguments)


@assign_extend_cache_locs.register_fake
@assign_draft_cache_locs_contiguous.register_fake
def _(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""
