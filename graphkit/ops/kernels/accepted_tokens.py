"""Acceptance of draft trees for CUDA. Contracts: ``graphkit.ops.accepted_tokens``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.accepted_tokens import Accepted, empty_accepted
from graphkit.ops.kernels.launch import launch
from graphkit.ops.kernels.verification import walk_greedily


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
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    first = request * WIDTH
    path, drafts = walk_greedily(
        candidates + first, retrieve_next_token + first, retrieve_next_sibling + first,
        target_predict + first, WIDTH, COLUMNS, BLOCK_W,
    )  # fmt: skip
    tokens = tl.load(target_predict + first + path, mask=path >= 0, other=0)
    write_accepted(predict, accept_index, num_accepted_drafts, num_accepted_tokens, request, path,
                   tokens, drafts, WIDTH, COLUMNS, BLOCK_W)  # fmt: skip


def launch_accept_tokens(given: Any) -> Accepted:
    """Launch ``accept_tokens``."""
    return launch_per_request(accept_tokens_kernel, given, num_warps=1)


def launch_per_request(kernel: Any, given: Any, **options: Any) -> Accepted:
    """Launch one program per request."""
    predict, accept_index, drafts, tokens = accepted = empty_accepted(given)
    requests, width = given.candidates.shape
    launch(
        kernel, (requests,), given, predict=predict, accept_index=accept_index,
        num_accepted_drafts=drafts, num_accepted_tokens=tokens,
        WIDTH=width, COLUMNS=given.longest_path, BLOCK_W=triton.next_power_of_2(width), **options,
    )  # fmt: skip
    return accepted
