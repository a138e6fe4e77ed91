"""Sampled tree verification for CUDA. Contract: ``graphkit.ops.tree_sampling``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.verification import write_path

MAX_BLOCK = 8192
"""Words of the vocabulary that a program holds at a time."""
_NO_WORD = tl.constexpr(2**62)


@triton.jit
def _weights(target, draft, word, begin, end, refused, VOCAB: tl.constexpr):
    """What the words from ``begin`` to ``end`` weigh in the draw after a node."""
    p = tl.load(target + word, mask=word < VOCAB, other=0)
    q = tl.load(draft + word, mask=word < VOCAB, other=0)
    token = tl.min(tl.where(refused >= begin, refused, _NO_WORD), 0)
    while token < end:  # ascending: the blocks share the work of leaving the refused ones out
        p = tl.where(word == token, 0, p)
        token = tl.min(tl.where(refused > token, refused, _NO_WORD), 0)
    return tl.where(p - q <= 0, 0, p - q)  # NaN stays, and spoils the total


@triton.jit
def _first_past(limit, before, weight, place, BEHIND: tl.constexpr):
    """The first place that takes the running sum past ``limit``; places of no weight never do.

    Should rounding, or a coin of 1, leave none, it is the last place of any weight.
    """
    is_past = (before + tl.cumsum(weight, 0) > limit) & (weight > 0)
    first = tl.min(tl.where(is_past, place, BEHIND), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, place, -1), 0))


@triton.jit
def _draw(
    target, draft, refused, coin, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """A token by inverse cdf: first its block, then itself.

    It is the target's largest where the weights have no sum.
    """
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        weight = _weights(target, draft, begin + lane, begin, begin + BLOCK, refused, VOCAB)
        sums = tl.where(block * BLOCK == begin, tl.sum(weight, 0), sums)

    drawn = 0
    total = tl.sum(sums, 0)
    if (total > 0) & (total < float("inf")):
        hit = _first_past(coin * total, 0.0, sums, block, BLOCKS)
        before = tl.sum(tl.where(block < hit, sums, 0), 0)
        begin = hit * BLOCK
        weight = _weights(target, draft, begin + lane, begin, begin + BLOCK, refused, VOCAB)
        drawn = _first_past(coin * total, before, weight, begin + lane, VOCAB)
    else:
        largest = -float("inf")
        for begin in range(0, VOCAB, BLOCK):
            p = tl.load(target + begin + lane, mask=begin + lane < VOCAB, other=-float("inf"))
            p = tl.where(p == p, p, -float("inf"))
            drawn = tl.where(tl.max(p, 0) > largest, begin + tl.argmax(p, 0), drawn)
            largest = tl.maximum(tl.max(p, 0), largest)
    return drawn


@triton.jit(do_not_specialize=["rows"])
def tree_sampling_kernel(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling,
    coins, final_coins, target_probs, draft_probs, threshold_single, threshold_acc, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    column = tl.arange(0, BLOCK_A)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    tokens = tl.zeros([BLOCK_A], tl.int64)

    turn = tl.arange(0, BLOCK_W)
    refused = tl.full([BLOCK_W], -1, tl.int64)
    row = first * VOCAB
    coin = tl.load(coins + first)
    child = tl.load(next_token + first)
    summed = 0.0
    tried = 0
    drafts = 0
    while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
        token = tl.load(candidates + first + child)
        p = tl.load(target_probs + row + token, mask=(token >= 0) & (token < VOCAB), other=0)
        is_new = tl.max((refused == token).to(tl.int32), 0) == 0
        p = tl.where((p > 0) & is_new, p, 0)
        summed += p
        link = next_sibling
        if (p > 0) & ((coin * threshold_acc < summed) | (p >= threshold_single)):
            tokens = tl.where(column == drafts, token, tokens)
            drafts += 1
            path = tl.where(column == drafts, child, path)
            row = (first + child) * VOCAB
            coin = tl.load(coins + first + child)
            link = next_token
            summed = 0.0
            refused = tl.full([BLOCK_W], -1, tl.int64)
        else:
            refused = tl.where(turn == tried, token, refused)
        child = tl.load(link + first + child)
        tried += 1

    drawn = _draw(target_probs + row, draft_probs + row, refused, tl.load(final_coins + request),
                  VOCAB, BLOCK_V, BLOCKS)  # fmt: skip
    tokens = tl.where(column == drafts, drawn, tokens)
    write_path(predicts, accept_index, accept_token_num, retrieve_index, request, rows, path,
               tokens, drafts, WIDTH, COLUMNS, BLOCK_A)  # fmt: skip


def launch_tree_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """Launch on the current stream; as the op of ``graphkit.ops.tree_sampling``."""
    requests, width, vocab_size = target_probs.shape
    columns = accept_index.shape[1]
    if requests == 0:
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    tree_sampling_kernel[(requests,)](
        predicts, accept_index, accept_token_num, candidates.contiguous(),
        retrieve_index.contiguous(), retrieve_next_token.contiguous(),
        retrieve_next_sibling.contiguous(), uniform_samples.contiguous(),
        uniform_samples_for_final_sampling.contiguous(), target_probs.contiguous(),
        draft_probs.contiguous(), threshold_single, threshold_acc, predicts.shape[0],
        WIDTH=width, COLUMNS=columns, VOCAB=vocab_size,
        BLOCK_W=triton.next_power_of_2(width), BLOCK_A=triton.next_power_of_2(columns),
        BLOCK_V=block, BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        num_warps=16 if block == MAX_BLOCK else 4,
    )  # fmt: skip
