"""Sampled tree verification for CUDA. Contract: ``graphkit.ops.tree_sampling``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.sampling import draw_token, vocabulary_blocks
from graphkit.ops.kernels.verification import write_path


@triton.jit
def walk_by_samples(
    candidates, next_token, next_sibling, target_probs, draft_probs, samples, threshold_single,
    threshold_acc, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return one request's accepted nodes (-1 behind the last), the token after each, their number.

    All visits of a node, along a cycle, have the token after the last one: stores to the same place
    in one instruction have no order. The pointers point to the request's W entries;
    ``draft_probs`` may be None for zeros. ``samples`` holds the sample of each node, then the one
    of the bonus token. The number excludes the root.
    """
    column = tl.arange(0, BLOCK_A)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    tokens = tl.zeros([BLOCK_A], tl.int64)
    draw = tl.arange(0, BLOCK_D)

    turn = tl.arange(0, BLOCK_W)
    refused = tl.full([BLOCK_W], -1, tl.int64)
    node = tl.full((), 0, tl.int64)
    coin = tl.sum(tl.where(draw == 0, samples, 0), 0)
    child = tl.load(next_token)
    summed = 0.0
    tried = 0
    drafts = 0
    while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
        token = tl.load(candidates + child)
        p = tl.load(
            target_probs + node * VOCAB + token, mask=(token >= 0) & (token < VOCAB), other=0
        )
        is_new = tl.max((refused == token).to(tl.int32), 0) == 0
        p = tl.where((p > 0) & is_new, p, 0)
        summed += p
        link = next_sibling
        if (p > 0) & ((coin * threshold_acc < summed) | (p >= threshold_single)):
            tokens = tl.where(path == node, token, tokens)
            drafts += 1
            path = tl.where(column == drafts, child, path)
            node = child
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
        draft = draft_probs + node * VOCAB
    target = target_probs + node * VOCAB
    drawn = draw_token(target, draft, refused, target, coin, VOCAB, BLOCK_V, BLOCKS)
    return path, tl.where(path == node, drawn, tokens), drafts


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


def launch_tree_speculative_sampling_target_only(args: Any) -> None:
    """Launch ``tree_speculative_sampling_target_only``."""
    requests, width, vocab_size = args.target_probs.shape
    columns = args.accept_index.shape[1]
    launch(
        tree_sampling_kernel, (requests,), args, rows=args.predicts.shape[0],
        WIDTH=width, COLUMNS=columns, VOCAB=vocab_size, BLOCK_W=triton.next_power_of_2(width),
        BLOCK_A=triton.next_power_of_2(columns), BLOCK_D=triton.next_power_of_2(width + 1),
        **vocabulary_blocks(vocab_size),
    )  # fmt: skip
