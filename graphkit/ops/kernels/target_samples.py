"""The target's samples for CUDA. Contract: ``graphkit.ops.target_samples``.

Every node is drawn, in parallel, before the walk decides which of them count. A walk that drew
along its path would read the vocabulary once per accepted node, one after the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.philox import uniform
from graphkit.ops.kernels.tree_sampling import draw_token, vocabulary_blocks


@triton.jit(do_not_specialize=["width"])
def target_samples_kernel(
    tokens, target_probs, req_pool_indices, seeds, positions, width,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per node.

    One compiled kernel serves every width, so that sums are rounded in the same way for all.
    """
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_pool_indices + row // width)
    first_draw = tl.zeros([1], tl.int32)
    position = tl.load(positions + row).to(tl.int32)
    coin = tl.sum(uniform(tl.load(seeds + request), position, first_draw), 0)
    source = target_probs + row * VOCAB
    drawn = draw_token(source, None, None, source, coin, VOCAB, BLOCK_V, BLOCKS)
    tl.store(tokens + row, drawn)


def launch_target_samples(given: Any) -> torch.Tensor:
    """Launch ``target_samples``."""
    tokens: torch.Tensor = given.positions.new_empty(given.positions.numel())
    vocab_size = given.target_probs.shape[1]
    launch(
        target_samples_kernel, (len(tokens),), given, tokens=tokens,
        width=given.positions.shape[1], VOCAB=vocab_size, **vocabulary_blocks(vocab_size),
    )  # fmt: skip
    return tokens
