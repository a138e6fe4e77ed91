"""Sampled tree verification for CUDA. Contract: ``graphkit.ops.tree_sampling``."""

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.verification import write_path

MAX_BLOCK = 4096
"""Words of the vocabulary that a program holds at a time."""


@triton.jit
def _is_refused(token, candidates, next_sibling, child, refused):
    """Whether each token stands in one of the first ``refused`` siblings from ``child`` on."""
    found = token != token
    while refused > 0:
        found = found | (token == tl.load(candidates + child))
        child = tl.load(next_sibling + child)
        refused -= 1
    return found


@triton.jit
def _weights(
    word, target, draft, candidates, next_sibling, child, refused, VOCAB: tl.constexpr
):  # fmt: skip
    """What a block of words weighs in the draw after a node."""
    p = tl.load(target + word, mask=word < VOCAB, other=0)
    q = tl.load(draft + word, mask=word < VOCAB, other=0)
    p = tl.where(_is_refused(word, candidates, next_sibling, child, refused), 0, p)
    return tl.where(p - q <= 0, 0, p - q)  # NaN stays, and spoils the total


@triton.jit
def _draw(
    target, draft, candidates, next_sibling, child, refused, coin,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token by inverse cdf; the target's largest where the weights have no sum."""
    block = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, VOCAB, BLOCK):
        weight = _weights(start + block, target, draft, candidates, next_sibling, child, refused,
                          VOCAB)  # fmt: skip
        total += tl.sum(weight, 0)

    drawn = 0
    if (total > 0) & (total < float("inf")):
        # The same blocks add up to the same total, so only rounding in coin * total can miss it;
        # the last word that weighs anything stands in for that.
        limit = coin * total
        before = 0.0
        start = 0
        while (start < VOCAB) & ~(before > limit):
            word = start + block
            weight = _weights(word, target, draft, candidates, next_sibling, child, refused, VOCAB)
            is_past = (before + tl.cumsum(weight, 0) > limit) & (weight > 0)
            first = tl.min(tl.where(is_past, word, VOCAB), 0)
            last = tl.max(tl.where(weight > 0, word, -1), 0)
            drawn = tl.where(last >= 0, tl.minimum(first, last), drawn)
            before += tl.sum(weight, 0)
            start += BLOCK
    else:
        largest = -float("inf")
        for start in range(0, VOCAB, BLOCK):
            p = tl.load(target + start + block, mask=start + block < VOCAB, other=-float("inf"))
            p = tl.where(p == p, p, -float("inf"))
            drawn = tl.where(tl.max(p, 0) > largest, start + tl.argmax(p, 0), drawn)
            largest = tl.maximum(tl.max(p, 0), largest)
    return drawn


@triton.jit(do_not_specialize=["rows"])
def tree_sampling_kernel(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling,
    coins, final_coins, target_probs, draft_probs, threshold_single, threshold_acc, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_A: tl.constexpr,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    column = tl.arange(0, BLOCK_A)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    tokens = tl.zeros([BLOCK_A], tl.int64)

    row = first * VOCAB
    coin = tl.load(coins + first)
    first_child = tl.load(next_token + first)
    child = first_child
    summed = 0.0
    refused = 0
    tried = 0
    drafts = 0
    while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
        tried += 1
        token = tl.load(candidates + first + child)
        p = tl.load(target_probs + row + token, mask=(token >= 0) & (token < VOCAB), other=0)
        again = _is_refused(token, candidates + first, next_sibling + first, first_child, refused)
        p = tl.where((p > 0) & ~again, p, 0)
        summed += p
        if (p > 0) & ((coin * threshold_acc < summed) | (p >= threshold_single)):
            tokens = tl.where(column == drafts, token, tokens)
            drafts += 1
            path = tl.where(column == drafts, child, path)
            row = (first + child) * VOCAB
            coin = tl.load(coins + first + child)
            first_child = tl.load(next_token + first + child)
            child = first_child
            summed = 0.0
            refused = 0
        else:
            refused += 1
            child = tl.load(next_sibling + first + child)

    drawn = _draw(target_probs + row, draft_probs + row, candidates + first, next_sibling + first,
                  first_child, refused, tl.load(final_coins + request), VOCAB, BLOCK_V)  # fmt: skip
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
        WIDTH=width, COLUMNS=columns, BLOCK_A=triton.next_power_of_2(columns),
        VOCAB=vocab_size, BLOCK_V=block, num_warps=8 if block > 1024 else 4,
    )  # fmt: skip
