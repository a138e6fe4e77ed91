"""Random numbers of requests, and tokens drawn with them, for CUDA.

Contracts: ``graphkit.ops.sampling``. ``target_samples`` draws every node, in parallel, before the
walk decides which of them count. A walk that drew along its path would read the vocabulary once per
accepted node, one after the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before

BLOCK = 128
"""Threads of a program; each makes the four samples of one counter."""
MAX_BLOCK = 8192
"""Tokens of the vocabulary that a program holds at a time."""
_NO_TOKEN = tl.constexpr(2**62)
"""Larger than any token."""


@triton.jit
def uniform(seed, position, draw):
    """Return the samples of one request at some draws, int32 [n]."""
    zero = tl.zeros_like(draw)
    w0, w1, w2, w3 = tl.philox(seed + zero, position + zero, draw // 4, zero, zero)
    lane = draw % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return (word >> 8).to(tl.float32) * 2**-24


@triton.jit(do_not_specialize=["requests", "draws"])
def philox_uniform_kernel(samples, seeds, positions, requests, draws, BLOCK: tl.constexpr):
    """Four draws of one request per thread, BLOCK threads per program."""
    counters = (draws + 3) // 4
    thread = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request = thread // counters
    counter = (thread % counters).to(tl.int32)
    is_request = request < requests
    seed = tl.load(seeds + request, mask=is_request, other=0)
    position = tl.load(positions + request, mask=is_request, other=0)
    zero = tl.zeros_like(counter)
    words = tl.philox(seed, position, counter, zero, zero)
    for lane in tl.static_range(4):
        draw = counter * 4 + lane
        sample = (words[lane] >> 8).to(tl.float32) * 2**-24
        tl.store(samples + request * draws + draw, sample, mask=is_request & (draw < draws))


def launch_philox_uniform(args: Any, samples: torch.Tensor) -> None:
    """Launch ``philox_uniform``."""
    requests = args.seeds.numel()
    threads = requests * triton.cdiv(args.draws, 4)
    launch(
        philox_uniform_kernel, (triton.cdiv(threads, BLOCK),), args, samples=samples,
        requests=requests, BLOCK=BLOCK,
    )  # fmt: skip


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

    The weights are ``source`` without the refused tokens, less ``draft``; either may be None.
    Without a finite sum, return the token of the target's largest probability.
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


def vocabulary_blocks(vocab_size: int) -> dict[str, int]:
    """Return the blocks in which a program reads a vocabulary, and its warps."""
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    return {
        "BLOCK_V": block,
        "BLOCKS": triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        "num_warps": 16 if block == MAX_BLOCK else 4,
    }


@triton.jit(do_not_specialize=["width"])
def target_samples_kernel(
    tokens, target_probs, req_pool_indices, seeds, positions, width,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per node.

    One compiled kernel serves every width, so that sums are rounded in the same way for all.
    """
    wait_for_kernel_before(STARTS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_pool_indices + row // width)
    first_draw = tl.zeros([1], tl.int32)
    position = tl.load(positions + row).to(tl.int32)
    coin = tl.sum(uniform(tl.load(seeds + request), position, first_draw), 0)
    source = target_probs + row * VOCAB
    drawn = draw_token(source, None, None, source, coin, VOCAB, BLOCK_V, BLOCKS)
    tl.store(tokens + row, drawn)


def launch_target_samples(args: Any, tokens: torch.Tensor) -> None:
    """Launch ``target_samples``."""
    vocab_size = args.target_probs.shape[1]
    launch(
        target_samples_kernel, (len(tokens),), args, tokens=tokens,
        width=args.positions.shape[1], VOCAB=vocab_size, **vocabulary_blocks(vocab_size),
    )  # fmt: skip
