"""The draft tree for CUDA. Contract: ``graphkit.ops.tree``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.tree import TreeTensors, num_candidates

MAX_ROWS = 16
"""Nodes whose mask rows one program computes at a time."""


@triton.jit
def _parents(
    parent_list, top_scores_index, branches, candidates, topk,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Return the parent of each node of one request; -1 for the root, -2 behind the last node."""
    node = tl.arange(0, BLOCK_W)
    is_drafted = (node >= 1) & (node < WIDTH)
    candidate = tl.load(top_scores_index + node - 1, mask=is_drafted, other=-1)
    branch = candidate // topk
    has_parent = is_drafted & (branch >= 1) & (branch < branches)
    wanted = tl.load(parent_list + branch, mask=has_parent, other=-1)
    wanted = tl.where(wanted < candidates, wanted, -1)

    parent = tl.where(is_drafted, 0, tl.where(node == 0, -1, -2))
    for earlier in range(1, WIDTH):
        selected = tl.load(top_scores_index + earlier - 1)
        is_parent = (wanted == selected) & (wanted >= 0) & (earlier < node) & (parent == 0)
        parent = tl.where(is_parent, earlier, parent)
    return parent


@triton.jit
def build_tree_kernel(
    bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens,
    tree_mask, positions, retrieve_index, next_token, next_sibling, tokens,
    branches, candidates, topk,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, ROWS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request and ROWS of its nodes."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    drafted = request * (WIDTH - 1)
    parent = _parents(parent_list + request * branches, top_scores_index + drafted,
                      branches, candidates, topk, WIDTH, BLOCK_W)[None, :]  # fmt: skip
    node = tl.arange(0, BLOCK_W)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < WIDTH

    is_self = node == row[:, None]
    row_parent = tl.sum(tl.where(is_self, parent, 0), 1)
    child = tl.min(tl.where(parent == row[:, None], node, BLOCK_W), 1)
    is_later = (parent == row_parent[:, None]) & (node > row[:, None])
    sibling = tl.min(tl.where(is_later, node, BLOCK_W), 1)

    sees = is_self | (node == 0)
    ancestor = row_parent
    while tl.max(ancestor, 0) > 0:  # ends, since a parent has a smaller number
        is_ancestor = node == ancestor[:, None]
        sees = sees | is_ancestor
        ancestor = tl.sum(tl.where(is_ancestor, parent, 0), 1)
    depth = tl.sum(sees.to(tl.int64), 1) - 1

    flat = request * WIDTH + row
    is_drafted = is_row & (row >= 1)
    bonus = tl.load(bonus_tokens + request)
    token = tl.load(draft_tokens + drafted + row - 1, mask=is_drafted, other=0)
    tl.store(tokens + flat, tl.where(row == 0, bonus, token), mask=is_row)
    tl.store(positions + flat, tl.load(seq_lens + request) + depth, mask=is_row)
    tl.store(retrieve_index + flat, flat, mask=is_row)
    tl.store(next_token + flat, tl.where(child < BLOCK_W, child, -1), mask=is_row)
    tl.store(next_sibling + flat, tl.where(sibling < BLOCK_W, sibling, -1), mask=is_row)
    tl.store(tree_mask + flat[:, None] * WIDTH + node, sees, mask=is_row[:, None] & (node < WIDTH))


def launch_build_tree(args: Any, tree: TreeTensors) -> None:
    """Launch ``build_tree``."""
    tree_mask, positions, retrieve_index, next_token, next_sibling, tokens = tree
    requests, width, _ = tree_mask.shape
    block = triton.next_power_of_2(width)
    rows = min(MAX_ROWS, block)
    launch(
        build_tree_kernel, (requests, triton.cdiv(width, rows)), args,
        tree_mask=tree_mask, positions=positions, retrieve_index=retrieve_index,
        next_token=next_token, next_sibling=next_sibling, tokens=tokens,
        branches=args.parent_list.shape[1],
        candidates=num_candidates(args.num_steps, args.topk),
        WIDTH=width, BLOCK_W=block, ROWS=rows,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "steps", "drafts"])
def chain_candidates_kernel(
    parent_list, top_scores_index, draft_tokens, first_tokens, later_tokens,
    requests, steps, drafts, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    tl.store(parent_list + request * steps + step, step.to(tl.int64) - 1, mask=step < steps)
    is_draft = step < drafts
    later = later_tokens + (step - 1) * requests + request
    token = tl.load(later, mask=is_draft & (step > 0), other=0)
    token = tl.where(step == 0, tl.load(first_tokens + request), token)
    to = request * drafts + step
    tl.store(top_scores_index + to, step.to(tl.int64), mask=is_draft)
    tl.store(draft_tokens + to, token, mask=is_draft)


def launch_chain_candidates(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``chain_candidates``."""
    parent_list, top_scores_index, draft_tokens = results
    requests, steps = parent_list.shape
    launch(
        chain_candidates_kernel, (requests,), args, parent_list=parent_list,
        top_scores_index=top_scores_index, draft_tokens=draft_tokens, requests=requests,
        steps=steps, drafts=args.num_draft_tokens - 1, BLOCK=triton.next_power_of_2(steps),
        num_warps=1,
    )  # fmt: skip
