"""The most probable token for CUDA. Contract: ``graphkit.ops.argmax``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

MAX_BLOCK = 8192
"""Values that a program holds at a time."""
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def first_of(values, tokens):
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
    KEY: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    row = token
    if index is not None:
        row = tl.minimum(tl.maximum(tl.load(index + token), 0), rows - 1)
    best, _ = first_largest(logits + row * row_stride, VOCAB, BLOCK, KEY)
    best = best.to(tl.int64)
    if token_map is not None:
        best = tl.load(token_map + best)
    tl.store(tokens + token, best)


def launch_argmax_rows(given: Any) -> None:
    """Launch ``argmax_rows``."""
    logits = given.logits if given.logits.stride(1) == 1 else given.logits.contiguous()
    launch(
        argmax_rows_kernel, (len(given.tokens),), given, logits=logits, rows=len(logits),
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
