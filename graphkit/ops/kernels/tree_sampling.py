"""Sampled tree verification for CUDA. Contract: ``graphkit.ops.tree_sampling``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.verification import write_path

MAX_BLOCK = 8192
"""Tokens of the vocabulary that a program holds at a time."""
_NO_TOKEN = tl.constexpr(2**62)


@triton.jit
def _weights(source, draft, token, begin, end, refused, VOCAB: tl.constexpr):
    """Return the weights of the tokens from ``begin`` to ``end`` in the draw after a node."""
    p = tl.load(source + token, mask=token < VOCAB, other=0)
    if refused is not None:
        next_refused = tl.min(tl.where(refused >= begin, refused, _NO_TOKEN), 0)
        while next_refused < end:  # ascending, so each block visits its own refused tokens only
            p = tl.where(token == next_refused, 0, p)
            next_refused = tl.min(tl.where(refused > next_refused, refused, _NO_TOKEN), 0)
    if draft is not None:
        p -= tl.load(draft + token, mask=token < VOCAB, other=0)
    return tl.where(p <= 0, 0, p)  # NaN stays, so that the total is NaN


@triton.jit
def _first_past(limit, before, weight, index, BEHIND: tl.constexpr):
    """Return the first index whose running sum exceeds ``limit``, skipping weights of 0.

    If rounding or a sample of 1 leaves none, return the last index with a weight.
    """
    is_past = (before + tl.cumsum(weight, 0) > limit) & (weight > 0)
    first = tl.min(tl.where(is_past, index, BEHIND), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, index, -1), 0))


@triton.jit
def draw_token(
    source, draft, refused, target, coin,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw a token by inverse transform: first its block, then the token within it.

    The weights are those of ``source`` without the refused tokens, less ``draft``; either may be
    None. Without a finite sum, return the token of the target's largest probability.
    """
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        weight = _weights(source, draft, begin + lane, begin, begin + BLOCK, refused, VOCAB)
        sums = tl.where(block * BLOCK == begin, tl.sum(weight, 0), sums)

    drawn = 0
    total = tl.sum(sums, 0)
    if (total > 0) & (total < float("inf")):
        hit = _first_past(coin * total, 0.0, sums, block, BLOCKS)
        before = tl.sum(tl.where(block < hit, sums, 0), 0)
        begin = hit * BLOCK
        weight = _weights(source, draft, begin + lane, begin, begin + BLOCK, refused, VOCAB)
        drawn = _first_past(coin * total, before, weight, begin + lane, VOCAB)
    else:
        largest = -float("inf")
        for begin in range(0, VOCAB, BLOCK):
            p = tl.load(target + begin + lane, mask=begin + lane < VOCAB, other=-float("inf"))
            p = tl.where(p == p, p, -float("inf"))
            drawn = tl.where(tl.max(p, 0) > largest, begin + tl.argmax(p, 0), drawn)
            largest = tl.maximum(tl.max(p, 0), largest)
    return drawn


@triton.jit
def walk_by_samples(
    candidates, next_token, next_sibling, target_probs, draft_probs, samples, threshold_single,
    threshold_acc, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return one request's accepted nodes (-1 behind the last), the token after each, their number.

    The pointers are those of the request's W entries; ``draft_probs`` may be None for zeros.
    ``samples`` holds that of each node, then that of the bonus token. The number excludes the root.
    """
    column = tl.arange(0, BLOCK_A)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    tokens = tl.zeros([BLOCK_A], tl.int64)
    draw = tl.arange(0, BLOCK_D)

    turn = tl.arange(0, BLOCK_W)
    refused = tl.full([BLOCK_W], -1, tl.int64)
    row = tl.full((), 0, tl.int64)
    coin = tl.sum(tl.where(draw == 0, samples, 0), 0)
    child = tl.load(next_token)
    summed = 0.0
    tried = 0
    drafts = 0
    while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
        token = tl.load(candidates + child)
        p = tl.load(target_probs + row + token, mask=(token >= 0) & (token < VOCAB), other=0)
        is_new = tl.max((refused == token).to(tl.int32), 0) == 0
        p = tl.where((p > 0) & is_new, p, 0)
        summed += p
        link = next_sibling
        if (p > 0) & ((coin * threshold_acc < summed) | (p >= threshold_single)):
            tokens = tl.where(column == drafts, token, tokens)
            drafts += 1
            path = tl.where(column == drafts, child, path)
            row = child * VOCAB
            coin = tl.sum(tl.where(draw == child, samples, 0), 0)
            link = next_token
            summed = 0.0
            refused = tl.full([BLOCK_W], -1, tl.int64)
        else:
            refused = tl.where(turn == tried, token, refused)
        child = tl.load(link + child)
        tried += 1

    coin = tl.sum(tl.where(draw == WIDTH, samples, 0), 0)
    draft = draft_probs
    if draft_probs is not None:
        draft = draft_probs + row
    target = target_probs + row
    drawn = draw_token(target, draft, refused, target, coin, VOCAB, BLOCK_V, BLOCKS)
    return path, tl.where(column == drafts, drawn, tokens), drafts


@triton.jit(do_not_specialize=["rows"])
def tree_sampling_kernel(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
    retrieve_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs,
    draft_probs, threshold_single, threshold_acc, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    draw = tl.arange(0, BLOCK_D)
    samples = tl.load(uniform_samples + first + draw, mask=draw < WIDTH, other=0)
    last = tl.load(uniform_samples_for_final_sampling + request)
    draft = draft_probs
    if draft_probs is not None:
        draft = draft_probs + first * VOCAB
    path, tokens, drafts = walk_by_samples(
        candidates + first, retrieve_next_token + first, retrieve_next_sibling + first,
        target_probs + first * VOCAB, draft,
        tl.where(draw == WIDTH, last, samples), threshold_single, threshold_acc,
        WIDTH, COLUMNS, VOCAB, BLOCK_W, BLOCK_A, BLOCK_D, BLOCK_V, BLOCKS,
    )  # fmt: skip
    write_path(predicts, accept_index, accept_token_num, retrieve_index, request, rows, path,
               tokens, drafts, WIDTH, COLUMNS, BLOCK_A)  # fmt: skip


def launch_tree_speculative_sampling_target_only(given: Any) -> None:
    """Launch ``tree_speculative_sampling_target_only``."""
    requests, width, vocab_size = given.target_probs.shape
    columns = given.accept_index.shape[1]
    launch(
        tree_sampling_kernel, (requests,), given, rows=given.predicts.shape[0],
        WIDTH=width, COLUMNS=columns, VOCAB=vocab_size, BLOCK_W=triton.next_power_of_2(width),
        BLOCK_A=triton.next_power_of_2(columns), BLOCK_D=triton.next_power_of_2(width + 1),
        **vocabulary_blocks(vocab_size),
    )  # fmt: skip


def vocabulary_blocks(vocab_size: int) -> dict[str, int]:
    """Return the blocks in which a program reads a vocabulary, and its warps."""
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    return {
        "BLOCK_V": block,
        "BLOCKS": triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        "num_warps": 16 if block == MAX_BLOCK else 4,
    }
