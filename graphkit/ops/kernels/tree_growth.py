"""Growth of a draft tree for CUDA. Contracts: ``graphkit.ops.tree_growth``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.tree import num_candidates

MAX_OTHERS = 64
"""Candidates that all others are compared with at a time."""


@triton.jit
def _ranks_before(score, number, other_score, other_number):
    """Return whether each of the others ranks before each score, [scores, others]."""
    score, number = score[:, None], number[:, None]
    other_score, other_number = other_score[None, :], other_number[None, :]
    is_nan, is_other_nan = score != score, other_score != other_score
    is_equal = (score == other_score) | (is_nan & is_other_nan)
    is_larger = (other_score > score) | (is_other_nan & (score == score))
    return is_larger | (is_equal & (other_number < number))


@triton.jit(do_not_specialize=["candidates", "parents"])
def plant_tree_kernel(
    scores, tokens, parent_list, rows, mask, topk_p, topk_index, candidates, parents, num_steps,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    branch = tl.arange(0, BLOCK_K)
    is_branch = branch < TOPK
    at = request * TOPK + branch
    p = tl.load(topk_p + at, mask=is_branch)
    tl.store(scores + request * candidates + branch, p, mask=is_branch)
    token = tl.load(topk_index + at, mask=is_branch)
    tl.store(tokens + request * candidates + branch, token, mask=is_branch)
    tl.store(rows + at, request, mask=is_branch)
    first = tl.arange(0, BLOCK_P)
    is_first = (first < parents) & (first <= TOPK)
    tl.store(parent_list + request * parents + first, first.to(tl.int64) - 1, mask=is_first)
    slot = tl.arange(0, BLOCK_D)
    slots = TOPK * num_steps
    own = slot[None, :] == branch[:, None] * num_steps
    inside = is_branch[:, None] & (slot[None, :] < slots)
    tl.store(mask + at[:, None] * slots + slot[None, :], own, mask=inside)


def launch_plant_tree(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``plant_tree``."""
    scores, tokens, parent_list, rows, mask = results
    requests, topk = args.topk_index.shape
    launch(
        plant_tree_kernel, (requests,), args, scores=scores, tokens=tokens,
        parent_list=parent_list, rows=rows, mask=mask, candidates=scores.shape[1],
        parents=parent_list.shape[1], TOPK=topk, BLOCK_K=triton.next_power_of_2(topk),
        BLOCK_P=triton.next_power_of_2(topk + 1), BLOCK_D=triton.next_power_of_2(mask.shape[2]),
    )  # fmt: skip


@triton.jit(do_not_specialize=["candidates", "parents", "first", "step"])
def grow_tree_kernel(
    scores, tokens, parent_list, new_scores, new_tokens, new_parents, new_rows, new_mask,
    branch_scores, topk_p, topk_index, mask, candidates, parents, num_steps, first, step,
    TOPK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    OTHERS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK_N)
    is_new = each < TOPK * TOPK
    source = request * TOPK * TOPK
    score = _child_scores(branch_scores + request * TOPK, topk_p + source, each, TOPK)
    token = tl.load(topk_index + source + each, mask=is_new, other=0)
    to = request * candidates + first + each
    tl.store(scores + to, score, mask=is_new)
    tl.store(tokens + to, token, mask=is_new)

    rank = tl.zeros([BLOCK_N], tl.int32)
    for begin in range(0, TOPK * TOPK, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        other_score = _child_scores(branch_scores + request * TOPK, topk_p + source, other, TOPK)
        before = _ranks_before(score, each, other_score, other) & (other < TOPK * TOPK)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    rank = tl.where(is_new, rank, BLOCK_N)

    branch = tl.arange(0, BLOCK_K)
    is_branch = branch < TOPK
    is_chosen = rank[None, :] == branch[:, None]
    order = tl.sum(tl.where(is_chosen, each[None, :], 0), 1)
    parent = order // TOPK
    at = request * TOPK + branch
    # Selected, not multiplied: a score may be infinite.
    tl.store(new_scores + at, tl.sum(tl.where(is_chosen, score[None, :], 0), 1), mask=is_branch)
    tl.store(new_tokens + at, tl.sum(tl.where(is_chosen, token[None, :], 0), 1), mask=is_branch)
    tl.store(new_parents + at, parent.to(tl.int64), mask=is_branch)
    tl.store(new_rows + at, request * TOPK + parent, mask=is_branch)
    column = TOPK * step + 1 + branch
    listed = parent_list + request * parents + column
    tl.store(listed, (order + first).to(tl.int64), mask=is_branch & (column < parents))

    slot = tl.arange(0, BLOCK_D)[None, :]
    slots = TOPK * num_steps
    inside = is_branch[:, None] & (slot < slots)
    seen = tl.load(mask + (request * TOPK + parent)[:, None] * slots + slot, mask=inside, other=0)
    own = slot == branch[:, None] * num_steps + step
    tl.store(new_mask + at[:, None] * slots + slot, (seen != 0) | own, mask=inside)


@triton.jit
def _child_scores(branch_scores, topk_p, each, TOPK: tl.constexpr):
    """Return the scores of candidates of one request's step."""
    is_new = each < TOPK * TOPK
    score = tl.load(branch_scores + each // TOPK, mask=is_new, other=0)
    return score * tl.load(topk_p + each, mask=is_new, other=0)


def launch_grow_tree(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``grow_tree``."""
    scores, tokens, parents, rows, mask = results
    (requests, topk), slots = args.branch_scores.shape, args.mask.shape[2]
    block = triton.next_power_of_2(topk * topk)
    launch(
        grow_tree_kernel, (requests,), args, new_scores=scores, new_tokens=tokens,
        new_parents=parents, new_rows=rows, new_mask=mask, candidates=args.scores.shape[1],
        parents=args.parent_list.shape[1], num_steps=slots // topk,
        first=num_candidates(args.step, topk), TOPK=topk, BLOCK_N=block,
        BLOCK_K=triton.next_power_of_2(topk), BLOCK_D=triton.next_power_of_2(slots),
        OTHERS=min(MAX_OTHERS, block),
    )  # fmt: skip


@triton.jit(do_not_specialize=["drafts"])
def choose_nodes_kernel(
    chosen, drafted, scores, tokens, drafts,
    CANDIDATES: tl.constexpr, BLOCK_N: tl.constexpr, OTHERS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK_N)
    inside = each < CANDIDATES
    at = request * CANDIDATES
    score = tl.load(scores + at + each, mask=inside, other=0)
    rank = tl.zeros([BLOCK_N], tl.int32)
    for begin in range(0, CANDIDATES, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        other_score = tl.load(scores + at + other, mask=other < CANDIDATES, other=0)
        before = _ranks_before(score, each, other_score, other) & (other < CANDIDATES)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    is_chosen = inside & (rank < drafts)
    to = request * drafts + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + to, each.to(tl.int64), mask=is_chosen)
    tl.store(drafted + to, tl.load(tokens + at + each, mask=is_chosen), mask=is_chosen)


def launch_choose_nodes(args: Any, results: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Launch ``choose_nodes``."""
    chosen, drafted = results
    requests, candidates = args.scores.shape
    block = triton.next_power_of_2(candidates)
    launch(
        choose_nodes_kernel, (requests,), args, chosen=chosen, drafted=drafted,
        drafts=args.num_draft_tokens - 1, CANDIDATES=candidates, BLOCK_N=block,
        OTHERS=min(MAX_OTHERS, block),
    )  # fmt: skip
