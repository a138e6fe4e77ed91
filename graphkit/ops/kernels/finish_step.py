"""End of a step for CUDA. Contract: ``graphkit.ops.finish_step``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch
from graphkit.ops.loop_layout import Report, RequestEnd

_ROW = tl.constexpr(int(Report.ROW))
_ACCEPTED = tl.constexpr(int(Report.ACCEPTED))
_NEW = tl.constexpr(int(Report.NEW))
_END = tl.constexpr(int(Report.END))
_TOKENS = tl.constexpr(int(Report.TOKENS))
_RUNNING = tl.constexpr(int(RequestEnd.RUNNING))
_STOP = tl.constexpr(int(RequestEnd.STOP))
_LENGTH = tl.constexpr(int(RequestEnd.LENGTH))


@triton.jit(do_not_specialize=["width", "columns"])
def finish_step_kernel(
    report, req_pool_indices, predict, num_accepted_tokens, stop_ids, seq_lens, bonus_tokens,
    remaining, width, columns, STOPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    longest = columns - _TOKENS
    row = tl.load(req_pool_indices + request)
    accepted = tl.load(num_accepted_tokens + request)
    left = tl.load(remaining + row)
    is_live = (row > 0) & (left > 0)
    column = tl.arange(0, BLOCK_P)
    token = tl.load(predict + request * width + column, mask=column < longest, other=-1)
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


def launch_finish_step(given: Any) -> torch.Tensor:
    """Launch ``finish_step``."""
    requests, stops = len(given.req_pool_indices), given.stop_ids.shape[1]
    columns = Report.TOKENS + given.longest_path
    report: torch.Tensor = given.seq_lens.new_empty((requests, columns))
    width = len(given.predict) // requests if requests else 1
    launch(
        finish_step_kernel, (requests,), given, report=report, width=width, columns=columns,
        STOPS=stops, BLOCK_P=triton.next_power_of_2(given.longest_path),
        BLOCK_X=triton.next_power_of_2(stops), num_warps=1,
    )  # fmt: skip
    return report
