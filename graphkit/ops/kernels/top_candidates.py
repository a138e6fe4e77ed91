"""The most probable tokens for CUDA. Contract: ``graphkit.ops.top_candidates``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels import argmax
from graphkit.ops.kernels.launch import launch
from graphkit.ops.top_candidates import empty_candidates

_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _scores(row, token, divisor, VOCAB: tl.constexpr):
    """Return logits over the temperature, -inf outside the vocabulary."""
    value = tl.load(row + token, mask=token < VOCAB, other=-float("inf"))
    return tl.div_rn(value.to(tl.float32), divisor)


@triton.jit(do_not_specialize=["rows", "topk"])
def top_candidates_kernel(
    probs, tokens, logits, index, temperature, token_map, rows, row_stride, topk,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per row. A lane holds its largest score that is not yet chosen."""
    to = tl.program_id(0).to(tl.int64)
    row = to
    if index is not None:
        row = tl.minimum(tl.maximum(tl.load(index + to), 0), rows - 1)
    source = logits + row * row_stride
    divisor = 1.0
    if temperature is not None:
        divisor = tl.load(temperature + to)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    first = tl.where(lane < VOCAB, lane, _NO_TOKEN)
    for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
        score = _scores(source, begin + lane, divisor, VOCAB)
        is_larger = score > largest  # never NaN
        first = tl.where(is_larger, begin + lane, first)
        largest = tl.where(is_larger, score, largest)
    top = tl.max(largest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
        weight = tl.exp(_scores(source, begin + lane, divisor, VOCAB) - top)
        sums += tl.where(begin + lane < VOCAB, weight, 0)
    total = tl.sum(sums, 0)

    block = tl.arange(0, BLOCKS)
    for each in range(topk):
        best = tl.max(largest, 0)
        token = tl.min(tl.where(largest == best, first, _NO_TOKEN), 0)
        tl.store(probs + to * topk + each, tl.exp(best - top) / total)
        chosen = token.to(tl.int64)
        if token_map is not None:
            chosen = tl.load(token_map + chosen, mask=token < VOCAB, other=0)
        tl.store(tokens + to * topk + each, chosen)
        # The lane that held it finds its next one.
        other = token % BLOCK + block * BLOCK
        score = _scores(source, other, divisor, VOCAB)
        is_left = (score < best) | ((score == best) & (other > token))
        is_left = is_left & (other < VOCAB)
        score = tl.where(is_left, score, -float("inf"))
        following = tl.max(score, 0)
        found = tl.min(tl.where(is_left & (score == following), other, _NO_TOKEN), 0)
        first = tl.where(lane == token % BLOCK, found, first)
        largest = tl.where(lane == token % BLOCK, following, largest)


def launch_top_candidates(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``top_candidates``."""
    probs, tokens = candidates = empty_candidates(given)
    logits = given.logits if given.logits.stride(1) == 1 else given.logits.contiguous()
    vocab_size = logits.shape[1]
    options = argmax.vocabulary_block(logits)
    del options["KEY"]
    launch(
        top_candidates_kernel, (len(probs),), given, probs=probs, tokens=tokens, logits=logits,
        rows=len(logits), row_stride=logits.stride(0), VOCAB=vocab_size,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, options["BLOCK"])), **options,
    )  # fmt: skip
    return candidates
