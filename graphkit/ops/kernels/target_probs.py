"""The distribution of a request's tokens for CUDA. Contract: ``graphkit.ops.target_probs``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.argmax import first_largest, vocabulary_block
from graphkit.ops.kernels.launch import launch

_ABOVE_1 = tl.constexpr(0x3F80_0001)
"""Bits of the float32 after 1."""


@triton.jit
def _sum_from(weights, bound, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of a row's weights that are at least ``bound``."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
        weight = tl.load(weights + begin + lane, mask=begin + lane < VOCAB, other=0)
        sums += tl.where(weight >= bound, weight, 0)
    return tl.sum(sums, 0)


@triton.jit
def _largest_bound(weights, goal, is_count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest bound whose weights reach ``goal`` by their number or by their sum.

    Numbers of 0 to 1 have the order of their bits, which are searched exactly. Each reading of the
    row tries three bounds, so that 15 readings find one of 2**30.
    """
    lane = tl.arange(0, BLOCK)
    low = tl.full((), 0, tl.int32)  # its weights reach the goal
    high = tl.full((), _ABOVE_1, tl.int32)  # its weights do not
    while high - low > 1:
        step = (high - low + 3) // 4
        bound1 = (low + step).to(tl.float32, bitcast=True)
        bound2 = (low + 2 * step).to(tl.float32, bitcast=True)
        bound3 = (low + 3 * step).to(tl.float32, bitcast=True)
        sums1 = tl.zeros([BLOCK], tl.float32)
        sums2 = tl.zeros([BLOCK], tl.float32)
        sums3 = tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
            weight = tl.load(weights + begin + lane, mask=begin + lane < VOCAB, other=-1)
            amount = tl.where(is_count, 1.0, weight)
            sums1 += tl.where(weight >= bound1, amount, 0)
            sums2 += tl.where(weight >= bound2, amount, 0)
            sums3 += tl.where(weight >= bound3, amount, 0)
        # Rounding keeps the order: more weights never have a smaller sum.
        reach1 = (tl.sum(sums1, 0) >= goal).to(tl.int32)
        reach2 = (tl.sum(sums2, 0) >= goal).to(tl.int32)
        reach3 = (tl.sum(sums3, 0) >= goal).to(tl.int32)
        low = tl.minimum(low + (reach1 + reach2 + reach3) * step, high - 1)  # any reach a goal of 0
        high = tl.minimum(high, low + step)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def target_probs_kernel(
    probs, logits, req_pool_indices, temperatures, top_ks, top_ps, min_ps, width, row_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """One program per row, which reads it three times, and up to 35 times with filters."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_pool_indices + row // width)
    temperature = tl.load(temperatures + request)
    top_k = tl.load(top_ks + request)
    top_p = tl.load(top_ps + request)
    min_p = tl.load(min_ps + request)
    is_greedy = temperature == 0
    divisor = tl.where(is_greedy, 1.0, temperature)
    source = logits + row * row_stride
    target = probs + row * VOCAB
    token, largest = first_largest(source, VOCAB, BLOCK, KEY)
    largest = largest.to(tl.float32)
    lane = tl.arange(0, BLOCK)
    if ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature > 0):
        for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
            each = begin + lane
            value = tl.load(source + each, mask=each < VOCAB, other=0).to(tl.float32)
            weight = tl.exp(tl.div_rn(value - largest, divisor))
            tl.store(target + each, weight, mask=each < VOCAB)
        tl.debug_barrier()  # other threads read the weights
        bound = 0.0
        if top_k > 0:
            bound = _largest_bound(target, top_k.to(tl.float32), True, VOCAB, BLOCK)
        if top_p < 1:
            goal = top_p * _sum_from(target, bound, VOCAB, BLOCK)
            bound = tl.maximum(bound, _largest_bound(target, goal, False, VOCAB, BLOCK))
        bound = tl.maximum(bound, min_p)
        total = _sum_from(target, bound, VOCAB, BLOCK)
        for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
            each = begin + lane
            weight = tl.load(target + each, mask=each < VOCAB, other=0)
            prob = tl.where(weight >= bound, weight, 0) / total
            tl.store(target + each, prob, mask=each < VOCAB)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
            value = tl.load(source + begin + lane, mask=begin + lane < VOCAB, other=-float("inf"))
            weight = tl.exp(tl.div_rn(value.to(tl.float32) - largest, divisor))
            sums += tl.where(begin + lane < VOCAB, weight, 0)
        total = tl.sum(sums, 0)
        for begin in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
            each = begin + lane
            value = tl.load(source + each, mask=each < VOCAB, other=0)
            prob = tl.exp(tl.div_rn(value.to(tl.float32) - largest, divisor)) / total
            prob = tl.where(is_greedy, (each == token).to(tl.float32), prob)
            tl.store(target + each, prob, mask=each < VOCAB)


def launch_target_probs(given: Any) -> torch.Tensor:
    """Launch ``target_probs``."""
    logits = given.logits if given.logits.stride(1) == 1 else given.logits.contiguous()
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        target_probs_kernel, (len(logits),), given, probs=probs, logits=logits,
        row_stride=logits.stride(0), VOCAB=logits.shape[1], **vocabulary_block(logits),
    )  # fmt: skip
    return probs
