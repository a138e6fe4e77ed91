"""Rows of the target and of the catch-up for CUDA. Contracts: ``graphkit.ops.target_rows``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.target_rows import (
    ExtendRows,
    VerifyRows,
    empty_extend_rows,
    empty_verify_rows,
)

MAX_NODES = 16
"""Nodes whose mask rows one program reads."""


@triton.jit(do_not_specialize=["rows", "vocab_size"])
def verify_rows_kernel(
    tokens, positions, slots, req_pool_indices, req_to_token, seq_lens, bonus_tokens, draft_tokens,
    tree_mask, rows, context, vocab_size,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """One program per request and NODES of its nodes."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    is_node = node < WIDTH
    flat = request * WIDTH + node
    draft = tl.load(draft_tokens + flat, mask=is_node, other=0)
    draft = tl.minimum(tl.maximum(draft, 0), vocab_size - 1)
    bonus = tl.load(bonus_tokens + request)
    tl.store(tokens + flat, tl.where(node == 0, bonus, draft), mask=is_node)

    seq_len = tl.load(seq_lens + request).to(tl.int64)
    depth = node.to(tl.int64)
    if tree_mask is not None:
        other = tl.arange(0, BLOCK_W)[None, :]
        inside = is_node[:, None] & (other > 0) & (other < WIDTH)
        seen = tl.load(tree_mask + flat[:, None] * WIDTH + other, mask=inside, other=0)
        depth = tl.sum(seen.to(tl.int64), 1)
    tl.store(positions + flat, seq_len + depth, mask=is_node)

    row = tl.load(req_pool_indices + request)
    token = seq_len + node
    inside = (row >= 0) & (row < rows) & (token >= 0) & (token < context) & is_node
    slot = tl.load(req_to_token + row * context + token, mask=inside, other=0)
    tl.store(slots + flat, slot, mask=is_node)


def launch_verify_rows(given: Any) -> VerifyRows:
    """Launch ``verify_rows``."""
    tokens, positions, slots = verify = empty_verify_rows(given)
    (rows, context), width = given.req_to_token.shape, given.num_draft_tokens
    block = triton.next_power_of_2(width)
    nodes = min(MAX_NODES, block)
    launch(
        verify_rows_kernel, (len(given.seq_lens), triton.cdiv(width, nodes)), given,
        tokens=tokens, positions=positions, slots=slots,
        rows=rows, context=context,
        WIDTH=width, BLOCK_W=block, NODES=nodes,
    )  # fmt: skip
    return verify


@triton.jit(do_not_specialize=["width"])
def extend_rows_kernel(
    lengths, extend_lengths, positions, select_index, seq_lens, num_accepted_drafts, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + request)
    tl.store(lengths + request, seq_len + width)
    tl.store(extend_lengths + request, width)
    drafts = tl.load(num_accepted_drafts + request)
    tl.store(select_index + request, request * width + drafts)
    step = tl.arange(0, BLOCK)
    position = seq_len.to(tl.int64) + step
    tl.store(positions + request * width + step, position, mask=step < width)


def launch_extend_rows(given: Any) -> ExtendRows:
    """Launch ``extend_rows``."""
    lengths, extend_lengths, positions, select_index = rows = empty_extend_rows(given)
    launch(
        extend_rows_kernel, (len(lengths),), given, lengths=lengths,
        extend_lengths=extend_lengths, positions=positions, select_index=select_index,
        BLOCK=triton.next_power_of_2(given.width), num_warps=1,
    )  # fmt: skip
    return rows
