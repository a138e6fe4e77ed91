"""Rows of the forwards of a step: drafts, target and catch-up, and windows of token ids.

Dimensions: B requests, T token ids of all, K topk, S num_steps, W rows of each request of the
target, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.packed import locate, read
from graphkit.ops.registration import register_op


@register_op()
def first_draft_rows(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    topk: Annotated[int, "K >= 1"],
    num_steps: Annotated[int, "S >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B * K] int64"],
    Annotated[torch.Tensor, "[B * K * S] int64"],
]:
    """Return positions and KV slots of the rows of a DRAFT batch.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        seq_lens: Committed tokens.
        topk: Branches (K).
        num_steps: Draft tokens per branch (S).

    Returns:
        ``seq_lens`` once per branch, [B * K] int64, and the K * S slots behind each request's
        committed tokens, ``req_to_token[row of b, seq : seq + K * S]``, [B * K * S] int64; 0 where
        that is outside the table.
    """
    draft = torch.arange(topk * num_steps, device=seq_lens.device)
    token = (req_pool_indices[:, None], seq_lens[:, None] + draft)
    slots = read(req_to_token, token, torch.zeros_like(draft))
    return seq_lens.long().repeat_interleave(topk), slots.flatten()


@register_op(sizes_from=("seq_lens",))
def draft_step_rows(
    positions: Annotated[torch.Tensor, "[B * K] int64"],
    out_cache_loc: Annotated[torch.Tensor, "[B * K * S] int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    topk: Annotated[int, "K >= 1"],
    num_steps: Annotated[int, "S >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[S - 1, B * K] int64"],
    Annotated[torch.Tensor, "[S - 1, B * K] int64"],
    Annotated[torch.Tensor, "[S - 1, B] int32"],
]:
    """Return the rows of each forward of a DRAFT batch. There are S - 1 forwards.

    The rows of a chain are consecutive, so the metadata of step s appends them to the s tokens
    drafted before. The branches of a tree are S slots apart: their mask covers all K * S slots.

    Args:
        positions: Position of each branch at step 0.
        out_cache_loc: KV slot of each branch and step. Its layout is [B, K, S].
        seq_lens: Committed tokens.
        topk: Branches (K).
        num_steps: Draft tokens per branch (S).

    Returns:
        Positions and slots of each step's rows, [S - 1, B * K] int64 each, contiguous, and the
        lengths before the K rows that the attention metadata of the step appends, [S - 1, B] int32.
    """
    step = torch.arange(num_steps - 1, dtype=torch.int32, device=seq_lens.device)[:, None]
    ahead = step if topk == 1 else torch.full_like(step, topk * (num_steps - 1))
    slots = out_cache_loc.view(-1, num_steps)[:, : num_steps - 1].t()
    return positions + step, slots.clone(memory_format=torch.contiguous_format), seq_lens + ahead


@register_op()
def verify_rows(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[B] int64"],
    draft_tokens: Annotated[torch.Tensor, "[B * W] int64"],
    tree_mask: Annotated[torch.Tensor | None, "[B, W, W] bool"],
    num_draft_tokens: Annotated[int, "W >= 1"],
    vocab_size: Annotated[int, "V >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B * W] int64"],
]:
    """Return token ids, positions and KV slots of the rows of a TARGET_VERIFY batch.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        seq_lens: Committed tokens.
        bonus_tokens: Token of each root.
        draft_tokens: Token of each node; the token of the root is not read.
        tree_mask: True where node i attends to node j, which is i itself or an ancestor; ``None``
            for chains, whose node i is at depth i.
        num_draft_tokens: Nodes per request (W).
        vocab_size: Size of the vocabulary (V).

    Returns:
        Three tensors [B * W] int64: the bonus token at each root and the drafts behind it, those
        outside the vocabulary replaced by its nearest id; ``seq_lens`` plus the depth of each node;
        and the W slots behind the committed tokens, 0 where they are outside the table.
    """
    node = torch.arange(num_draft_tokens, device=seq_lens.device)
    drafts = draft_tokens.view(-1, num_draft_tokens).clamp(0, vocab_size - 1)
    tokens = torch.where(node == 0, bonus_tokens[:, None], drafts)
    # Every node but the root attends to the root, and counts itself.
    depth = node if tree_mask is None else tree_mask[:, :, 1:].sum(2)
    slot = (req_pool_indices[:, None], seq_lens[:, None] + node)
    slots = read(req_to_token, slot, torch.zeros_like(node))
    return tokens.flatten(), (seq_lens[:, None] + depth).flatten(), slots.flatten()


@register_op()
def pack_rows(
    num_drafts: Annotated[torch.Tensor, "[B] int32"],
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    tokens: Annotated[torch.Tensor, "[B * W] int64"],
    positions: Annotated[torch.Tensor, "[B * W] int64"],
    slots: Annotated[torch.Tensor, "[B * W] int64"],
    width: Annotated[int, "W >= 1"],
    num_rows: Annotated[int, "T >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[T] int64"],
    Annotated[torch.Tensor, "[T] int64"],
    Annotated[torch.Tensor, "[T] int64"],
    Annotated[torch.Tensor, "[T] int64"],
    Annotated[torch.Tensor, "[T] int64"],
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B, W] int64"],
]:
    """Pack the first nodes of each chain: those of a request follow those of the one before.

    Args:
        num_drafts: Drafts of each request that are packed, below W; -1 for none of its nodes. There
            are at most T nodes, the roots included.
        req_pool_indices: Request rows.
        tokens: Results of ``verify_rows``, like the next two.
        positions: Positions.
        slots: KV slots.
        width: Nodes per request (W).
        num_rows: Packed rows (T). Those behind the last node are pads.

    Returns:
        A tuple of eight tensors:

        lengths: [B] int32, packed nodes of each request.
        nodes: [T] int64, node ``b * W + i`` of each row, -1 for pads.
        request rows, tokens, positions, slots: [T] int64 each, those of the nodes, 0 for pads.
        row_of: [B * W] int64, row of each node; for a node that is not packed, that of the last one
            of its request that is, or any row.
        next_token: [B, W] int64, the node behind each packed one, -1 behind the last.
    """
    lengths, none = num_drafts + 1, torch.zeros(num_rows, dtype=torch.int64, device=slots.device)
    request, node, is_node = locate(torch.nn.functional.pad(lengths, (0, 1)), num_rows)
    nodes = request * width + node

    def packed(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return read(values, (index,), none, is_node)

    column = torch.arange(width, device=slots.device)
    begins, last = (lengths.cumsum(0) - lengths)[:, None], (lengths - 1)[:, None].clamp(min=0)
    row_of = (begins + torch.minimum(column, last)).clamp(max=num_rows - 1)
    return (
        lengths,
        torch.where(is_node, nodes, -1),
        packed(req_pool_indices, request),
        packed(tokens, nodes),
        packed(positions, nodes),
        packed(slots, nodes),
        row_of.flatten(),
        torch.where(column < lengths[:, None] - 1, column + 1, -1),
    )


@register_op()
def extend_rows(
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32"],
    width: Annotated[int, "W >= 1"],
) -> tuple[
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[B] int32"],
    Annotated[torch.Tensor, "[B * W] int64"],
    Annotated[torch.Tensor, "[B] int64"],
]:
    """Return lengths, positions and last rows of a batch that catches up on W rows per request.

    Args:
        seq_lens: Committed tokens before the step.
        num_accepted_drafts: Accepted drafts, the bonus token excluded.
        width: Rows per request (W).

    Returns:
        ``seq_lens`` with the W rows, [B] int32; W itself, [B] int32; the position of each row, [B *
        W] int64; and the flat row of each request's last accepted token, ``b * W +
        num_accepted_drafts``, [B] int64.
    """
    step = torch.arange(width, device=seq_lens.device)
    starts = torch.arange(len(seq_lens), device=seq_lens.device) * width
    return (
        seq_lens + width,
        torch.full_like(seq_lens, width),
        (seq_lens[:, None] + step).flatten(),
        starts + num_accepted_drafts,
    )


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
