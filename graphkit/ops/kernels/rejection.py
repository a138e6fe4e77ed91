"""Acceptance by rejection sampling for CUDA. Contract: ``graphkit.ops.rejection``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.sampling import draw_token, uniform, vocabulary_blocks
from graphkit.ops.kernels.verification import launch_per_request, write_accepted
from graphkit.ops.verification import Accepted


@triton.jit
def _refuse(left, p, q, token, p_sum, q_sum, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Write what a refused token leaves of p to ``left``; return the sums of that and of q.

    -1 marks refused tokens. ``p`` may be ``left``.
    """
    tl.debug_barrier()  # every thread has read p of the token
    lane = tl.arange(0, BLOCK)
    p_sums = tl.zeros([BLOCK], tl.float32)
    q_sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        each = begin + lane
        share = tl.load(p + each, mask=each < VOCAB, other=0)
        drafted = tl.load(q + each, mask=each < VOCAB, other=0)
        is_refused = (share < 0) | (each == token)
        rest = tl.div_rn(share, p_sum) - tl.div_rn(drafted, q_sum)
        rest = tl.where(rest <= 0, 0, rest)  # NaN stays
        tl.store(left + each, tl.where(is_refused, -1.0, rest), mask=each < VOCAB)
        p_sums += tl.where(is_refused, 0, rest)
        q_sums += tl.where(is_refused, 0, drafted)
    tl.debug_barrier()  # threads read what others have written
    return tl.sum(p_sums, 0), tl.sum(q_sums, 0)


@triton.jit
def accept_by_rejection_kernel(
    predict, accept_index, num_accepted_drafts, num_accepted_tokens, candidates,
    retrieve_next_token, retrieve_next_sibling, target_probs, draft_probs, left, req_pool_indices,
    seeds, positions, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per request. It reads the vocabulary once per refused draft, and for the bonus.

    ``left``, [B, V], holds p after a refused draft.
    """
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    pool_row = tl.load(req_pool_indices + request)
    draw = tl.arange(0, BLOCK_D)
    samples = uniform(tl.load(seeds + pool_row), tl.load(positions + pool_row), draw)
    column = tl.arange(0, BLOCK_W)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    tokens = tl.zeros([BLOCK_W], tl.int64)

    left += request * VOCAB
    node = tl.full((), 0, tl.int64)
    has_left = False  # whether p is `left`
    p_sum = 1.0
    q_sum = 1.0
    child = tl.load(retrieve_next_token + first)
    tried = 0
    drafts = 0
    if WIDTH > 1 and COLUMNS > 1:  # Triton 3.6.0 cannot compile a loop that never runs; 3.7.1 can
        while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
            token = tl.load(candidates + first + child)
            is_token = (token >= 0) & (token < VOCAB)
            row = (first + node) * VOCAB
            p = target_probs + row
            if has_left:
                p = left
            share = tl.load(p + token, mask=is_token, other=-1)
            drafted = tl.load(draft_probs + row + token, mask=is_token, other=0)
            coin = tl.sum(tl.where(draw == child, samples, 0), 0)
            link = retrieve_next_sibling
            if (drafted > 0) & ((share >= 0) | (share != share)):  # -1 is refused
                if coin * tl.div_rn(drafted, q_sum) < tl.div_rn(share, p_sum):
                    tokens = tl.where(path == node, token, tokens)  # of all visits of the node
                    drafts += 1
                    path = tl.where(column == drafts, child, path)
                    node = child
                    has_left = False
                    p_sum = 1.0
                    q_sum = 1.0
                    link = retrieve_next_token
                else:
                    p_sum, q_sum = _refuse(
                        left, p, draft_probs + row, token, p_sum, q_sum, VOCAB, BLOCK_V
                    )  # fmt: skip
                    has_left = True
            child = tl.load(link + first + child)
            tried += 1

    coin = tl.sum(tl.where(draw == WIDTH, samples, 0), 0)
    row = (first + node) * VOCAB
    p = target_probs + row
    if has_left:
        p = left
    # p of refused tokens is below 0, which draws none of them.
    bonus = draw_token(p, None, None, target_probs + row, coin, VOCAB, BLOCK_V, BLOCKS)
    tokens = tl.where(path == node, bonus, tokens)
    write_accepted(predict, accept_index, num_accepted_drafts, num_accepted_tokens, request, path,
                   tokens, drafts, WIDTH, COLUMNS, BLOCK_W)  # fmt: skip


def launch_accept_by_rejection(args: Any, accepted: Accepted) -> None:
    """Launch ``accept_by_rejection``."""
    (requests, width), vocab_size = args.candidates.shape, args.target_probs.shape[1]
    launch_per_request(
        accept_by_rejection_kernel, args, accepted,
        left=args.target_probs.new_empty(requests, vocab_size), VOCAB=vocab_size,
        BLOCK_D=triton.next_power_of_2(width + 1), **vocabulary_blocks(vocab_size),
    )  # fmt: skip
