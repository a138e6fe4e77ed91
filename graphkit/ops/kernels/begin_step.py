"""Start of a step for CUDA. Contract: ``graphkit.ops.begin_step``."""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.begin_step import Running, empty_running
from graphkit.ops.kernels.launch import launch

BLOCK = 128


@triton.jit(do_not_specialize=["requests"])
def begin_step_kernel(
    rows, lengths, tokens, req_pool_indices, remaining, seq_lens, bonus_tokens, requests,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK requests per program."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < requests
    row = tl.load(req_pool_indices + request, mask=is_request, other=0)
    row = tl.where(tl.load(remaining + row, mask=is_request, other=0) > 0, row, 0)
    tl.store(rows + request, row, mask=is_request)
    tl.store(lengths + request, tl.load(seq_lens + row, mask=is_request), mask=is_request)
    tl.store(tokens + request, tl.load(bonus_tokens + row, mask=is_request), mask=is_request)


def launch_begin_step(given: Any) -> Running:
    """Launch ``begin_step``."""
    rows, lengths, tokens = running = empty_running(given)
    requests = len(rows)
    launch(
        begin_step_kernel, (triton.cdiv(requests, BLOCK),), given,
        rows=rows, lengths=lengths, tokens=tokens, requests=requests, BLOCK=BLOCK,
    )  # fmt: skip
    return running
