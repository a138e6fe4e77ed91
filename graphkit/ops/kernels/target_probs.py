"""The distribution of a request's tokens for CUDA. Contract: ``graphkit.ops.target_probs``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.argmax import first_largest, vocabulary_block
from graphkit.ops.kernels.launch import launch


@triton.jit
def target_probs_kernel(
    probs, logits, req_pool_indices, temperatures, width, row_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """One program per row, which reads it three times."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + tl.load(req_pool_indices + row // width))
    is_greedy = temperature == 0
    divisor = tl.where(is_greedy, 1.0, temperature)
    source = logits + row * row_stride
    token, largest = first_largest(source, VOCAB, BLOCK, KEY)
    largest = largest.to(tl.float32)
    lane = tl.arange(0, BLOCK)
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
        tl.store(probs + row * VOCAB + each, prob, mask=each < VOCAB)


def launch_target_probs(given: Any) -> torch.Tensor:
    """Launch ``target_probs``."""
    logits = given.logits if given.logits.stride(1) == 1 else given.logits.contiguous()
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        target_probs_kernel, (len(logits),), given, probs=probs, logits=logits,
        row_stride=logits.stride(0), VOCAB=logits.shape[1], **vocabulary_block(logits),
    )  # fmt: skip
    return probs
