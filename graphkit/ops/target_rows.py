"""Rows of the target's forward, and of the catch-up after it.

Dimensions: B requests, W rows of each, V vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.ops.packed import read
from graphkit.ops.registration import register_op

VerifyRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ExtendRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def empty_verify_rows(given: Any) -> VerifyRows:
    """Allocate the results of ``verify_rows``."""
    tokens = given.draft_tokens
    return (
        tokens.new_empty(len(tokens)),
        tokens.new_empty(len(tokens)),
        tokens.new_empty(len(tokens)),
    )


@register_op(fake=empty_verify_rows)
def verify_rows(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    bonus_tokens: Annotated[torch.Tensor, "[B] int64"],
    draft_tokens: Annotated[torch.Tensor, "[B * W] int64"],
    tree_mask: Annotated[torch.Tensor | None, "[B, W, W] bool"],
    num_draft_tokens: Annotated[int, "W >= 1"],
    vocab_size: Annotated[int, "V >= 1"],
) -> VerifyRows:
    """Return token ids, positions and KV slots of the rows of a TARGET_VERIFY batch.

    Args:
        req_pool_indices: Row of ``req_to_token`` per request.
        req_to_token: Slot of each token of each request.
        seq_lens: Committed tokens.
        bonus_tokens: Token of each root.
        draft_tokens: Token of each node; that of the root is not read.
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


def empty_extend_rows(given: Any) -> ExtendRows:
    """Allocate the results of ``extend_rows``."""
    lengths, requests = given.seq_lens, len(given.seq_lens)
    positions = lengths.new_empty(requests * given.width, dtype=torch.int64)
    select_index = lengths.new_empty(requests, dtype=torch.int64)
    return lengths.new_empty(requests), lengths.new_empty(requests), positions, select_index


@register_op(fake=empty_extend_rows)
def extend_rows(
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    num_accepted_drafts: Annotated[torch.Tensor, "[B] int32"],
    width: Annotated[int, "W >= 1"],
) -> ExtendRows:
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
