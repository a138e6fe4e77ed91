"""Rows of the forwards of a draft model, and the candidates of a chain.

Dimensions: B requests, K topk, S num_steps, W num_draft_tokens, F forwards after the first.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.packed import read
from graphkit.ops.registration import register_op

FirstRows = tuple[torch.Tensor, torch.Tensor]
StepRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_first_rows(given: Any) -> FirstRows:
    """Allocate the results of ``first_draft_rows``."""
    rows, tokens = given.req_pool_indices, len(given.req_pool_indices) * given.topk
    return rows.new_empty(tokens), rows.new_empty(tokens * given.num_steps)


@register_op(fake=empty_first_rows)
def first_draft_rows(
    req_pool_indices: Annotated[torch.Tensor, "[B] int64"],
    req_to_token: Annotated[torch.Tensor, "[rows, context] int32 or int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    topk: Annotated[int, "K >= 1"],
    num_steps: Annotated[int, "S >= 1"],
) -> FirstRows:
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


def empty_step_rows(given: Any) -> StepRows:
    """Allocate the results of ``draft_step_rows``."""
    steps, tokens = given.num_steps - 1, len(given.positions)
    rows = [given.positions.new_empty(steps, tokens) for _ in range(2)]
    return rows[0], rows[1], given.seq_lens.new_empty(steps, len(given.seq_lens))


@register_op(fake=empty_step_rows, sizes_from=("seq_lens",))
def draft_step_rows(
    positions: Annotated[torch.Tensor, "[B * K] int64"],
    out_cache_loc: Annotated[torch.Tensor, "[B * K * S] int64"],
    seq_lens: Annotated[torch.Tensor, "[B] int32"],
    topk: Annotated[int, "K >= 1"],
    num_steps: Annotated[int, "S >= 1"],
) -> StepRows:
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


def empty_candidates(given: Any) -> Candidates:
    """Allocate the results of ``chain_candidates``."""
    steps, requests = len(given.later_tokens) + 1, len(given.first_tokens)
    chosen = [given.first_tokens.new_empty(requests, given.num_draft_tokens - 1) for _ in range(2)]
    return given.first_tokens.new_empty(requests, steps), chosen[0], chosen[1]


def _check_width(given: Any) -> None:
    """Refuse chains of fewer tokens than W - 1."""
    steps = len(given.later_tokens) + 1
    if given.num_draft_tokens > steps + 1:
        raise InputError(
            f"chain_candidates: num_draft_tokens is {given.num_draft_tokens}, but {steps} steps "
            f"have at most {steps + 1} nodes, the root included.",
            field="num_draft_tokens",
        )


@register_op(fake=empty_candidates, check=_check_width)
def chain_candidates(
    first_tokens: Annotated[torch.Tensor, "[B, 1] int64"],
    later_tokens: Annotated[torch.Tensor, "[F, B] int64"],
    num_draft_tokens: Annotated[int, "W >= 1"],
) -> Candidates:
    """Return the first W - 1 tokens of each chain in the form that ``build_tree`` reads.

    Args:
        first_tokens: Token of step 0.
        later_tokens: Tokens of the further steps, S - 1 = F.
        num_draft_tokens: Nodes per chain, the root included (W). At most S + 1.

    Returns:
        ``parent_list`` [B, S], ``top_scores_index`` [B, W - 1] and ``draft_tokens`` [B, W - 1], all
        int64. Candidate s is the token of step s, and its parent is candidate s - 1.
    """
    tokens = torch.cat([first_tokens, later_tokens.t()], 1)
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    numbers = torch.arange(num_draft_tokens - 1, device=tokens.device)
    return (
        parents.repeat(len(tokens), 1),
        numbers.repeat(len(tokens), 1),
        tokens[:, : num_draft_tokens - 1].contiguous(),
    )
