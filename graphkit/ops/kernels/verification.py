"""Acceptance of draft trees for CUDA. Contracts: ``graphkit.ops.verification``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.verification import Accepted


@triton.jit
def write_path(
    predicts, accept_index, accept_token_num, retrieve_index, request, rows, path, tokens, drafts,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Write one request's accepted nodes (-1 behind the last) and the token after each of them."""
    column = tl.arange(0, BLOCK_A)
    on_path = path >= 0
    flat = tl.load(retrieve_index + request * WIDTH + path, mask=on_path, other=-1)
    tl.store(accept_index + request * COLUMNS + column, flat, mask=column < COLUMNS)
    tl.store(accept_token_num + request, drafts)
    tl.store(predicts + flat, tokens, mask=on_path & (flat >= 0) & (flat < rows))


@triton.jit
def walk_greedily(
    candidates, next_token, next_sibling, target_predict,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Return one request's accepted nodes (-1 behind the last) and their number without the root.

    The pointers point to the request's W entries.
    """
    column = tl.arange(0, BLOCK_A)
    path = tl.where(column == 0, 0, -1).to(tl.int64)
    wanted = tl.load(target_predict)
    child = tl.load(next_token)
    tried = 0
    drafts = 0
    while (child >= 0) & (child < WIDTH) & (tried < WIDTH - 1) & (drafts < COLUMNS - 1):
        tried += 1
        link = next_sibling
        if tl.load(candidates + child) == wanted:
            drafts += 1
            path = tl.where(column == drafts, child, path)
            wanted = tl.load(target_predict + child)
            link = next_token
        child = tl.load(link + child)
    return path, drafts


@triton.jit(do_not_specialize=["rows"])
def verify_tree_greedy_kernel(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
    retrieve_next_sibling, target_predict, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    path, drafts = walk_greedily(
        candidates + first, retrieve_next_token + first, retrieve_next_sibling + first,
        target_predict + first, WIDTH, COLUMNS, BLOCK_A,
    )  # fmt: skip
    tokens = tl.load(target_predict + first + path, mask=path >= 0)
    write_path(predicts, accept_index, accept_token_num, retrieve_index, request, rows, path,
               tokens, drafts, WIDTH, COLUMNS, BLOCK_A)  # fmt: skip


def launch_verify_tree_greedy(args: Any) -> None:
    """Launch ``verify_tree_greedy``."""
    (requests, width), columns = args.candidates.shape, args.accept_index.shape[1]
    launch(
        verify_tree_greedy_kernel, (requests,), args, rows=args.predicts.shape[0],
        WIDTH=width, COLUMNS=columns, BLOCK_A=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip


@triton.jit
def write_accepted(
    predict, accept_index, num_accepted_drafts, num_accepted_tokens, request, path, tokens, drafts,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write one request's path, its tokens, which are 0 behind it, and its counts."""
    column = tl.arange(0, BLOCK_W)
    first = request * WIDTH
    index = tl.where(path >= 0, first + path, -1)
    tl.store(accept_index + request * COLUMNS + column, index, mask=column < COLUMNS)
    tl.store(predict + first + column, tokens, mask=column < WIDTH)
    tl.store(num_accepted_drafts + request, drafts)
    tl.store(num_accepted_tokens + request, drafts + 1)


@triton.jit
def accept_tokens_kernel(
    predict, accept_index, num_accepted_drafts, num_accepted_tokens, candidates,
    retrieve_next_token, retrieve_next_sibling, target_predict,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    path, drafts = walk_greedily(
        candidates + first, retrieve_next_token + first, retrieve_next_sibling + first,
        target_predict + first, WIDTH, COLUMNS, BLOCK_W,
    )  # fmt: skip
    tokens = tl.load(target_predict + first + path, mask=path >= 0, other=0)
    write_accepted(predict, accept_index, num_accepted_drafts, num_accepted_tokens, request, path,
                   tokens, drafts, WIDTH, COLUMNS, BLOCK_W)  # fmt: skip


def launch_accept_tokens(args: Any, accepted: Accepted) -> None:
    """Launch ``accept_tokens``."""
    launch_per_request(accept_tokens_kernel, args, accepted, num_warps=1)


def launch_per_request(kernel: Any, args: Any, accepted: Accepted, **options: Any) -> None:
    """Launch one program per request."""
    predict, accept_index, drafts, tokens = accepted
    requests, width = args.candidates.shape
    launch(
        kernel, (requests,), args, predict=predict, accept_index=accept_index,
        num_accepted_drafts=drafts, num_accepted_tokens=tokens,
        WIDTH=width, COLUMNS=args.longest_path, BLOCK_W=triton.next_power_of_2(width), **options,
    )  # fmt: skip
