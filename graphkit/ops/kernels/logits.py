"""Tokens from rows of logits for CUDA. Contracts: ``graphkit.ops.logits``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.logits import empty_candidates

BITMASK_BLOCK = 4096
"""Tokens of a program."""
MAX_BLOCK = 8192
"""Values that a program holds at a time."""
_NO_TOKEN = tl.constexpr(2**31 - 1)
"""Larger than any token."""


@triton.jit
def apply_token_bitmask_kernel(
    logits, bitmask, row_stride, column_stride, WORDS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of tokens; it reads no logits."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + row * WORDS + token // 32, mask=token < VOCAB, other=-1)
    is_refused = ((word >> (token % 32)) & 1) == 0
    target = logits + row * row_stride + token.to(tl.int64) * column_stride
    tl.store(target, -float("inf"), mask=is_refused & (token < VOCAB))


def launch_apply_token_bitmask(args: Any) -> None:
    """Launch ``apply_token_bitmask``."""
    logits, (rows, vocab) = args.logits, args.logits.shape
    block = min(BITMASK_BLOCK, triton.next_power_of_2(vocab))
    launch(
        apply_token_bitmask_kernel, (rows, triton.cdiv(vocab, block)), args, logits=logits,
        row_stride=logits.stride(0), column_stride=logits.stride(1),
        WORDS=args.bitmask.shape[1], VOCAB=vocab, BLOCK=block,
    )  # fmt: skip


@triton.jit
def first_largest_of_lanes(values, tokens):
    """Return the smallest token of the largest value, and the value; NaN is larger than any."""
    nan = tl.min(tl.where(values != values, tokens, _NO_TOKEN), 0)
    value = tl.max(values, 0)
    token = tl.min(tl.where(values == value, tokens, _NO_TOKEN), 0)
    has_nan = nan < _NO_TOKEN
    return tl.where(has_nan, nan, token), tl.where(has_nan, float("nan"), value)


@triton.jit
def first_largest(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr):
    """Return index and value of the first largest number of a row; NaN is larger than any.

    KEY is a dtype that holds every value. Each lane keeps its own first largest value.
    """
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), KEY)
    first = lane
    first_nan = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
        each = begin + lane
        value = tl.load(row + each, mask=each < VOCAB, other=-float("inf")).to(KEY)
        first_nan = tl.where(value != value, tl.minimum(first_nan, each), first_nan)
        is_larger = value > largest
        first = tl.where(is_larger, each, first)
        largest = tl.where(is_larger, value, largest)
    nan = tl.min(first_nan, 0)
    value = tl.max(largest, 0)
    index = tl.min(tl.where(largest == value, first, _NO_TOKEN), 0)
    has_nan = nan < _NO_TOKEN
    return tl.where(has_nan, nan, index), tl.where(has_nan, float("nan"), value)


@triton.jit(do_not_specialize=["rows"])
def argmax_rows_kernel(
    tokens, logits, index, token_map, rows, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    KEY: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row = token
    if index is not None:
        row = tl.minimum(tl.maximum(tl.load(index + token), 0), rows - 1)
    best, _ = first_largest(logits + row * row_stride, VOCAB, BLOCK, KEY)
    best = best.to(tl.int64)
    if token_map is not None:
        best = tl.load(token_map + best)
    tl.store(tokens + token, best)


def launch_argmax_rows(args: Any) -> None:
    """Launch ``argmax_rows``."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    launch(
        argmax_rows_kernel, (len(args.tokens),), args, logits=logits, rows=len(logits),
        row_stride=logits.stride(0), VOCAB=logits.shape[1],
        **vocabulary_block(logits),
    )  # fmt: skip


def vocabulary_block(logits: torch.Tensor) -> dict[str, Any]:
    """Return the block in which a program reads a row, the dtype to compare in, and its warps."""
    block = min(MAX_BLOCK, triton.next_power_of_2(logits.shape[1]))
    return {
        "BLOCK": block,
        "KEY": tl.float64 if logits.dtype is torch.float64 else tl.float32,
        "num_warps": 16 if block == MAX_BLOCK else 4,
    }


@triton.jit
def _scores(row, token, divisor, VOCAB: tl.constexpr):
    """Return logits over the temperature, -inf outside the vocabulary."""
    value = tl.load(row + token, mask=token < VOCAB, other=-float("inf"))
    return tl.div_rn(value.to(tl.float32), divisor)


@triton.jit(do_not_specialize=["rows", "topk"])
def top_candidates_kernel(
    probs, tokens, logits, index, temperature, token_map, rows, row_stride, topk,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row. A lane holds its largest score that is not yet chosen."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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


def launch_top_candidates(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``top_candidates``."""
    probs, tokens = candidates = empty_candidates(args)
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    vocab_size = logits.shape[1]
    options = vocabulary_block(logits)
    del options["KEY"]
    launch(
        top_candidates_kernel, (len(probs),), args, probs=probs, tokens=tokens, logits=logits,
        rows=len(logits), row_stride=logits.stride(0), VOCAB=vocab_size,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, options["BLOCK"])), **options,
    )  # fmt: skip
    return candidates
