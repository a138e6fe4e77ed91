"""Tokens of plain steps for CUDA. Contract: ``graphkit.ops.stored_tokens``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before

BLOCK = 1024
"""Elements of a hidden state that a program copies at a time."""


@triton.jit(do_not_specialize=["width", "slots", "depth"])
def store_tokens_kernel(
    req_pool_indices, predict, stored_tokens, count, hidden_states, stored_states,
    width, slots, depth, hidden, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices + request)
    is_live = row > 0
    tokens = tl.load(count + row)
    place = row * slots + tokens % depth
    tl.store(stored_tokens + place, tl.load(predict + request * width), mask=is_live)
    if hidden_states is not None:
        each = tl.arange(0, BLOCK)
        for first in range(0, hidden, BLOCK):
            inside = (first + each < hidden) & is_live
            state = tl.load(hidden_states + request * width * hidden + first + each, mask=inside)
            tl.store(stored_states + place * hidden + first + each, state, mask=inside)
    tl.store(count + row, tokens + 1, mask=is_live)


def launch_store_tokens(args: Any) -> None:
    """Launch ``store_tokens``."""
    requests = len(args.req_pool_indices)
    launch(
        store_tokens_kernel, (requests,), args, width=len(args.predict) // max(requests, 1),
        slots=args.stored_tokens.shape[1],
        hidden=0 if args.hidden_states is None else args.hidden_states.shape[1],
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
