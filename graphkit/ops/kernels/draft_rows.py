"""Rows of a draft model for CUDA. Contracts: ``graphkit.ops.draft_rows``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.draft_rows import (
    Candidates,
    FirstRows,
    StepRows,
    empty_candidates,
    empty_first_rows,
    empty_step_rows,
)
from graphkit.ops.kernels.launch import launch

BLOCK = 128


@triton.jit(do_not_specialize=["rows", "topk", "drafts"])
def first_draft_rows_kernel(
    positions, out_cache_loc, req_pool_indices, req_to_token, seq_lens, rows, context, topk, drafts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request)
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    each = tl.arange(0, BLOCK)
    token = seq_len + each
    inside = (row >= 0) & (row < rows) & (token >= 0) & (token < context) & (each < drafts)
    slot = tl.load(req_to_token + row * context + token, mask=inside, other=0)
    tl.store(out_cache_loc + request * drafts + each, slot, mask=each < drafts)
    tl.store(positions + request * topk + each, seq_len, mask=each < topk)


def launch_first_draft_rows(given: Any) -> FirstRows:
    """Launch ``first_draft_rows``."""
    positions, out_cache_loc = first = empty_first_rows(given)
    (rows, context), drafts = given.req_to_token.shape, given.topk * given.num_steps
    launch(
        first_draft_rows_kernel, (len(given.seq_lens),), given,
        positions=positions, out_cache_loc=out_cache_loc, rows=rows, context=context,
        drafts=drafts, BLOCK=triton.next_power_of_2(drafts), num_warps=1,
    )  # fmt: skip
    return first


@triton.jit(do_not_specialize=["requests", "tokens", "topk", "num_steps"])
def draft_step_rows_kernel(
    step_positions, step_slots, step_lengths, positions, out_cache_loc, seq_lens, requests, tokens,
    topk, num_steps, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per step and BLOCK of its rows."""
    step = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < tokens
    to = step.to(tl.int64) * tokens + row
    tl.store(step_positions + to, tl.load(positions + row, mask=is_row) + step, mask=is_row)
    slot = tl.load(out_cache_loc + row.to(tl.int64) * num_steps + step, mask=is_row)
    tl.store(step_slots + to, slot, mask=is_row)
    is_request = row < requests
    ahead = tl.where(topk == 1, step, topk * (num_steps - 1))
    length = tl.load(seq_lens + row, mask=is_request) + ahead
    tl.store(step_lengths + step * requests + row, length, mask=is_request)


def launch_draft_step_rows(given: Any) -> StepRows:
    """Launch ``draft_step_rows``."""
    positions, slots, lengths = rows = empty_step_rows(given)
    steps, tokens = positions.shape
    launch(
        draft_step_rows_kernel, (steps, triton.cdiv(tokens, BLOCK)), given,
        step_positions=positions, step_slots=slots, step_lengths=lengths,
        requests=len(given.seq_lens), tokens=tokens, BLOCK=BLOCK,
    )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["requests", "steps", "drafts"])
def chain_candidates_kernel(
    parent_list, top_scores_index, draft_tokens, first_tokens, later_tokens,
    requests, steps, drafts, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request."""
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


def launch_chain_candidates(given: Any) -> Candidates:
    """Launch ``chain_candidates``."""
    parent_list, top_scores_index, draft_tokens = candidates = empty_candidates(given)
    requests, steps = parent_list.shape
    launch(
        chain_candidates_kernel, (requests,), given, parent_list=parent_list,
        top_scores_index=top_scores_index, draft_tokens=draft_tokens, requests=requests,
        steps=steps, drafts=given.num_draft_tokens - 1, BLOCK=triton.next_power_of_2(steps),
        num_warps=1,
    )  # fmt: skip
    return candidates
