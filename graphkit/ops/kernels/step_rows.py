"""Rows of the forwards of a step for CUDA. Contracts: ``graphkit.ops.step_rows``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before

BLOCK = 128
"""Rows of a program."""
MAX_NODES = 16
"""Nodes whose mask rows one program reads."""
WINDOW_BLOCK = 1024
"""Ids of a window that a program moves at a time."""


@triton.jit(do_not_specialize=["rows", "topk", "drafts"])
def first_draft_rows_kernel(
    positions, out_cache_loc, req_pool_indices, req_to_token, seq_lens, rows, context, topk, drafts,
    BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request)
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    each = tl.arange(0, BLOCK)
    token = seq_len + each
    inside = (row >= 0) & (row < rows) & (token >= 0) & (token < context) & (each < drafts)
    slot = tl.load(req_to_token + row * context + token, mask=inside, other=0)
    tl.store(out_cache_loc + request * drafts + each, slot, mask=each < drafts)
    tl.store(positions + request * topk + each, seq_len, mask=each < topk)


def launch_first_draft_rows(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``first_draft_rows``."""
    positions, out_cache_loc = results
    (rows, context), drafts = args.req_to_token.shape, args.topk * args.num_steps
    launch(
        first_draft_rows_kernel, (len(args.seq_lens),), args,
        positions=positions, out_cache_loc=out_cache_loc, rows=rows, context=context,
        drafts=drafts, BLOCK=triton.next_power_of_2(drafts), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "tokens", "topk", "num_steps"])
def draft_step_rows_kernel(
    step_positions, step_slots, step_lengths, positions, out_cache_loc, seq_lens, requests, tokens,
    topk, num_steps, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per step and BLOCK of its rows."""
    wait_for_kernel_before(STARTS_EARLY)
    step = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < tokens
    to = step.to(tl.int64) * tokens + row
    tl.store(step_positions + to, tl.load(positions + row, mask=is_row) + step, mask=is_row)
    slot = tl.load(out_cache_loc + row.to(tl.int64) * num_steps + step, mask=is_row)
    tl.store(step_slots + to, slot, mask=is_row)
    is_request = row < requests
    ahead = tl.where(topk == 1, step, topk * (num_steps - 1))
    length = tl.load(seq_lens + row, mask=is_request) + ahead
    tl.store(step_lengths + step * requests + row, length, mask=is_request)


def launch_draft_step_rows(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``draft_step_rows``."""
    positions, slots, lengths = results
    steps, tokens = positions.shape
    launch(
        draft_step_rows_kernel, (steps, triton.cdiv(tokens, BLOCK)), args,
        step_positions=positions, step_slots=slots, step_lengths=lengths,
        requests=len(args.seq_lens), tokens=tokens, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "vocab_size"])
def verify_rows_kernel(
    tokens, positions, slots, req_pool_indices, req_to_token, seq_lens, bonus_tokens, draft_tokens,
    tree_mask, rows, context, vocab_size,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, NODES: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request and NODES of its nodes."""
    wait_for_kernel_before(STARTS_EARLY)
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


def launch_verify_rows(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``verify_rows``."""
    tokens, positions, slots = results
    (rows, context), width = args.req_to_token.shape, args.num_draft_tokens
    block = triton.next_power_of_2(width)
    nodes = min(MAX_NODES, block)
    launch(
        verify_rows_kernel, (len(args.seq_lens), triton.cdiv(width, nodes)), args,
        tokens=tokens, positions=positions, slots=slots,
        rows=rows, context=context, WIDTH=width, BLOCK_W=block, NODES=nodes,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "num_rows", "width"])
def pack_rows_kernel(
    lengths, nodes, packed_rows, packed_tokens, packed_positions, packed_slots, row_of, next_token,
    num_drafts, req_pool_indices, tokens, positions, slots, requests, num_rows, width,
    REQUESTS: tl.constexpr, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK packed rows, and as many nodes, per program."""
    wait_for_kernel_before(STARTS_EARLY)
    each = tl.arange(0, REQUESTS)
    length = tl.load(num_drafts + each, mask=each < requests, other=-1) + 1
    end = tl.cumsum(length, 0)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(lengths + each, length, mask=each < requests)

    # Packed rows: the requests that end before a row come before its own.
    ends_before = (end[None, :] <= index[:, None]) & (each < requests)[None, :]
    request = tl.sum(ends_before.to(tl.int32), 1)
    begin = tl.max(tl.where(ends_before, end[None, :], 0), 1)
    is_row = index < num_rows
    is_node = is_row & (request < requests)
    node = (request * width + index - begin).to(tl.int64)
    tl.store(nodes + index, tl.where(is_node, node, -1), mask=is_row)
    row = tl.load(req_pool_indices + request, mask=is_node, other=0)
    tl.store(packed_rows + index, row, mask=is_row)
    token = tl.load(tokens + node, mask=is_node, other=0)
    tl.store(packed_tokens + index, token, mask=is_row)
    position = tl.load(positions + node, mask=is_node, other=0)
    tl.store(packed_positions + index, position, mask=is_row)
    slot = tl.load(slots + node, mask=is_node, other=0)
    tl.store(packed_slots + index, slot, mask=is_row)

    # Nodes.
    inside = index < requests * width
    request, column = index // width, index % width
    own = tl.load(num_drafts + request, mask=inside, other=-1) + 1
    begin = tl.sum(tl.where(each[None, :] < request[:, None], length[None, :], 0), 1)
    place = begin + tl.minimum(column, tl.maximum(own - 1, 0))
    tl.store(row_of + index, tl.minimum(place, num_rows - 1).to(tl.int64), mask=inside)
    following = tl.where(column < own - 1, column + 1, -1)
    tl.store(next_token + index, following.to(tl.int64), mask=inside)


def launch_pack_rows(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``pack_rows``."""
    lengths, nodes, rows, tokens, positions, slots, row_of, next_token = results
    requests, block = len(args.num_drafts), 32
    launch(
        pack_rows_kernel, (triton.cdiv(max(len(nodes), len(row_of)), block),), args,
        lengths=lengths, nodes=nodes, packed_rows=rows, packed_tokens=tokens,
        packed_positions=positions, packed_slots=slots, row_of=row_of, next_token=next_token,
        requests=requests, num_rows=args.num_rows,
        REQUESTS=triton.next_power_of_2(max(requests, 1)), BLOCK=block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def extend_rows_kernel(
    lengths, extend_lengths, positions, select_index, seq_lens, num_accepted_drafts, width,
    BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + request)
    tl.store(lengths + request, seq_len + width)
    tl.store(extend_lengths + request, width)
    drafts = tl.load(num_accepted_drafts + request)
    tl.store(select_index + request, request * width + drafts)
    step = tl.arange(0, BLOCK)
    position = seq_len.to(tl.int64) + step
    tl.store(positions + request * width + step, position, mask=step < width)


def launch_extend_rows(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``extend_rows``."""
    lengths, extend_lengths, positions, select_index = results
    launch(
        extend_rows_kernel, (len(lengths),), args, lengths=lengths,
        extend_lengths=extend_lengths, positions=positions, select_index=select_index,
        BLOCK=triton.next_power_of_2(args.width), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "token_stride"])
def rotate_input_ids_kernel(
    input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index, size, token_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request, BLOCK ids at a time from the left."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(extend_start_loc + request)
    end = tl.minimum(start + tl.load(extend_seq_lens + request), size)
    start = tl.maximum(start, 0)
    token = tl.load(topk_index + request * token_stride)
    selected = tl.load(select_index + request)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        following = tl.load(input_ids + at + 1, mask=at + 1 < end, other=0)
        # One thread stores where its neighbour loads, so all loads must come first.
        tl.debug_barrier()
        is_selected = at == selected
        moved = tl.where(is_selected, token.to(following.dtype), following)
        tl.store(input_ids + at, moved, mask=(at + 1 < end) | (is_selected & (at < end)))


def launch_rotate_input_ids(args: Any) -> None:
    """Launch ``rotate_input_ids``."""
    launch(
        rotate_input_ids_kernel, (args.select_index.numel(),), args,
        topk_index=args.topk_index, size=args.input_ids.numel(),
        token_stride=args.topk_index.stride(0), BLOCK=WINDOW_BLOCK,
    )  # fmt: skip
