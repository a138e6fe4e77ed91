"""State of the requests of a step for CUDA. Contracts: ``graphkit.ops.step_state``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.loop_layout import Report, RequestEnd
from graphkit.ops.step_state import Running, empty_running

BLOCK = 128
"""Requests of a program."""
_ROW = tl.constexpr(int(Report.ROW))
_ACCEPTED = tl.constexpr(int(Report.ACCEPTED))
_NEW = tl.constexpr(int(Report.NEW))
_END = tl.constexpr(int(Report.END))
_TOKENS = tl.constexpr(int(Report.TOKENS))
_RUNNING = tl.constexpr(int(RequestEnd.RUNNING))
_STOP = tl.constexpr(int(RequestEnd.STOP))
_LENGTH = tl.constexpr(int(RequestEnd.LENGTH))


@triton.jit(do_not_specialize=["requests"])
def begin_step_kernel(
    rows, lengths, tokens, req_pool_indices, remaining, seq_lens, bonus_tokens, requests,
    BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK requests per program."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < requests
    row = tl.load(req_pool_indices + request, mask=is_request, other=0)
    row = tl.where(tl.load(remaining + row, mask=is_request, other=0) > 0, row, 0)
    tl.store(rows + request, row, mask=is_request)
    tl.store(lengths + request, tl.load(seq_lens + row, mask=is_request), mask=is_request)
    tl.store(tokens + request, tl.load(bonus_tokens + row, mask=is_request), mask=is_request)


def launch_begin_step(args: Any) -> Running:
    """Launch ``begin_step``."""
    rows, lengths, tokens = running = empty_running(args)
    requests = len(rows)
    launch(
        begin_step_kernel, (triton.cdiv(requests, BLOCK),), args,
        rows=rows, lengths=lengths, tokens=tokens, requests=requests, BLOCK=BLOCK,
    )  # fmt: skip
    return running


@triton.jit(do_not_specialize=["width", "columns"])
def finish_step_kernel(
    report, req_pool_indices, predict, num_accepted_tokens, stop_ids, seq_lens, bonus_tokens,
    remaining, width, columns, STOPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    longest = columns - _TOKENS
    row = tl.load(req_pool_indices + request)
    accepted = tl.load(num_accepted_tokens + request)
    left = tl.load(remaining + row)
    is_live = (row > 0) & (left > 0)
    column = tl.arange(0, BLOCK_P)
    is_token = (column < longest) & (column < width)
    token = tl.load(predict + request * width + column, mask=is_token, other=-1)
    token = token.to(tl.int64)
    each = tl.arange(0, BLOCK_X)
    stops = tl.load(stop_ids + row * STOPS + each, mask=each < STOPS, other=-1)
    most = tl.minimum(accepted, left)
    hits = (token[:, None] == stops[None, :]).to(tl.int32)
    is_stop = (tl.max(hits, 1) > 0) & (column < most) & (column < longest)
    first_stop = tl.min(tl.where(is_stop, column, longest), 0)
    new = tl.where(is_live, tl.minimum(most, first_stop + 1), 0)
    end = tl.where(first_stop < longest, _STOP, _LENGTH)
    has_ended = is_live & ((first_stop < longest) | (new == left))
    end = tl.where(has_ended, end, _RUNNING)

    line = report + request * columns
    tl.store(line + _ROW, tl.where(is_live, row, 0).to(tl.int32))
    tl.store(line + _ACCEPTED, tl.where(is_live, accepted, 0))
    tl.store(line + _NEW, new)
    tl.store(line + _END, end)
    shown = tl.where(column < new, token, -1).to(tl.int32)
    tl.store(line + _TOKENS + column, shown, mask=column < longest)
    # Pads share row 0 and write nothing.
    last = tl.minimum(tl.maximum(accepted - 1, 0), longest - 1)
    bonus = tl.sum(tl.where(column == last, token, 0), 0)
    tl.store(seq_lens + row, tl.load(seq_lens + row) + accepted, mask=is_live)
    tl.store(bonus_tokens + row, bonus, mask=is_live)
    tl.store(remaining + row, tl.where(has_ended, 0, left - new), mask=is_live)


def launch_finish_step(args: Any) -> torch.Tensor:
    """Launch ``finish_step``."""
    requests, stops = len(args.req_pool_indices), args.stop_ids.shape[1]
    columns = Report.TOKENS + args.longest_path
    report: torch.Tensor = args.seq_lens.new_empty((requests, columns))
    width = len(args.predict) // requests if requests else 1
    launch(
        finish_step_kernel, (requests,), args, report=report, width=width, columns=columns,
        STOPS=stops, BLOCK_P=triton.next_power_of_2(args.longest_path),
        BLOCK_X=triton.next_power_of_2(stops), num_warps=1,
    )  # fmt: skip
    return report
