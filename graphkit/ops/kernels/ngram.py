"""Drafts from earlier matches for CUDA. Contracts: ``graphkit.ops.ngram``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.ngram import MAX_MATCH

MAX_BLOCK = 1024
"""Columns that a program compares at a time."""
_MAX_MATCH = tl.constexpr(MAX_MATCH)


@triton.jit
def _scores(text, column, last, bonus, context):
    """Return length * C + column of the matches that end at columns before the last; else -1."""
    is_earlier = column < last
    is_equal = is_earlier
    length = tl.zeros_like(column)
    for back in tl.static_range(_MAX_MATCH):
        wanted = bonus
        if back > 0:  # the bonus token may not be in the text yet
            wanted = tl.load(text + last - back, mask=last >= back, other=-1)
        is_equal = is_equal & (column >= back)
        token = tl.load(text + column - back, mask=is_equal, other=0)
        is_equal = is_equal & (token == wanted)
        length += is_equal.to(tl.int32)
    return tl.where(is_earlier, length * context + column, -1)


@triton.jit(do_not_specialize=["topk"])
def ngram_drafts_kernel(
    drafts, text, req_pool_indices, seq_lens, bonus_tokens, context, topk,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program per request. A lane holds its best match that is not yet chosen."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request)
    last = tl.load(seq_lens + request)
    bonus = tl.load(bonus_tokens + request)
    own = text + row * context
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1, tl.int32)
    for begin in range(0, last, BLOCK):
        best = tl.maximum(best, _scores(own, begin + lane, last, bonus, context))

    node = tl.arange(0, BLOCK_W)
    block = tl.arange(0, BLOCKS)
    source = tl.full([BLOCK_W], 0, tl.int32) + last
    for chain in range(topk):
        score = tl.max(best, 0)
        match = tl.where(score < 0, last - 1, score % context)
        is_own = (node > 0) & ((node - 1) % topk == chain)
        source = tl.where(is_own, match + 1 + (node - 1) // topk % (last - match), source)
        # The lane that held it finds its next one. Scores differ, since columns do.
        score_of = _scores(own, match % BLOCK + block * BLOCK, last, bonus, context)
        following = tl.max(tl.where(score_of < score, score_of, -1), 0)
        best = tl.where(lane == match % BLOCK, following, best)
    token = tl.load(own + source, mask=(node < WIDTH) & (source < last), other=0)
    token = tl.where(source == last, bonus, token)
    tl.store(drafts + request * WIDTH + node, token, mask=node < WIDTH)
    tl.store(own + last, bonus, mask=(row > 0) & (last < context))


def launch_ngram_drafts(args: Any, drafts: torch.Tensor) -> None:
    """Launch ``ngram_drafts``."""
    requests, context, width = len(args.seq_lens), args.text.shape[1], args.width
    block = min(MAX_BLOCK, triton.next_power_of_2(context))
    launch(
        ngram_drafts_kernel, (requests,), args, drafts=drafts, context=context, WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width), BLOCK=block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(context, block)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def append_tokens_kernel(
    text, req_pool_indices, seq_lens, predict, context, width, BLOCK: tl.constexpr
):
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request)
    each = tl.arange(0, BLOCK)
    column = tl.load(seq_lens + request) + 1 + each
    inside = (each < width) & (column < context) & (row > 0)
    token = tl.load(predict + request * width + each, mask=inside)
    tl.store(text + row * context + column, token, mask=inside)


def launch_append_tokens(args: Any) -> None:
    """Launch ``append_tokens``."""
    launch(
        append_tokens_kernel, (len(args.seq_lens),), args, context=args.text.shape[1],
        BLOCK=triton.next_power_of_2(args.width), num_warps=1,
    )  # fmt: skip
