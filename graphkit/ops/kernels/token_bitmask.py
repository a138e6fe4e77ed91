"""Masks of the tokens that may follow for CUDA. Contract: ``graphkit.ops.token_bitmask``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

MAX_BLOCK = 4096
"""Tokens of a program."""


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


def launch_apply_token_bitmask(given: Any) -> None:
    """Launch ``apply_token_bitmask``."""
    logits, (rows, vocab) = given.logits, given.logits.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab))
    launch(
        apply_token_bitmask_kernel, (rows, triton.cdiv(vocab, block)), given, logits=logits,
        row_stride=logits.stride(0), column_stride=logits.stride(1),
        WORDS=given.bitmask.shape[1], VOCAB=vocab, BLOCK=block,
    )  # fmt: skip
