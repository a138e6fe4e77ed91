"""State of the requests of a step for CUDA. Contracts: ``graphkit.ops.step_state``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch, wait_for_kernel_before
from graphkit.ops.kernels.processors import LOGPROBS, PENALTIES
from graphkit.ops.loop_layout import NO_LOGPROB, Report, RequestEnd
from graphkit.ops.step_state import empty_report

BLOCK = 128
"""Requests of a program."""
_ROW = tl.constexpr(int(Report.ROW))
_ACCEPTED = tl.constexpr(int(Report.ACCEPTED))
_NEW = tl.constexpr(int(Report.NEW))
_END = tl.constexpr(int(Report.END))
_DRAFTS = tl.constexpr(int(Report.DRAFTS))
_TOKENS = tl.constexpr(int(Report.TOKENS))
_RUNNING = tl.constexpr(int(RequestEnd.RUNNING))
_STOP = tl.constexpr(int(RequestEnd.STOP))
_LENGTH = tl.constexpr(int(RequestEnd.LENGTH))
_NO_LOGPROB = tl.constexpr(NO_LOGPROB)


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


def launch_begin_step(args: Any, results: tuple[torch.Tensor, ...]) -> None:
    """Launch ``begin_step``."""
    rows, lengths, tokens = results
    requests = len(rows)
    launch(
        begin_step_kernel, (triton.cdiv(requests, BLOCK),), args,
        rows=rows, lengths=lengths, tokens=tokens, requests=requests, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _logprob(node, token, logits, log_sums, row_stride, column_stride, parts,
             BLOCK_C: tl.constexpr):  # fmt: skip
    """Return the log-probability of a token after a node, whose row of logits is given."""
    logit = tl.load(logits + node * row_stride + token * column_stride)
    part = tl.arange(0, BLOCK_C)
    sums = tl.load(log_sums + node * parts + part, mask=part < parts, other=-float("inf"))
    top = tl.max(sums, 0)
    # A part may have no finite logit, of which the weights are NaN.
    weight = tl.where(sums == -float("inf"), 0, tl.exp(sums - top))
    return logit.to(tl.float32) - (top + tl.log(tl.sum(weight, 0)))


@triton.jit(do_not_specialize=["width", "columns", "longest", "most_drafts"])
def finish_step_kernel(
    report, req_pool_indices, predict, num_accepted_tokens, stop_ids, seq_lens, bonus_tokens,
    remaining, kinds, token_counts, accept_index, logits, log_sums, num_drafts, most_drafts,
    width, columns, longest, row_stride, column_stride, parts, VOCAB: tl.constexpr,
    ACCEPTED: tl.constexpr, STOPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    wait_for_kernel_before(STARTS_EARLY)
    request = tl.program_id(0).to(tl.int64)
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
    drafts = most_drafts
    if num_drafts is not None:
        drafts = tl.load(num_drafts + request)
    tl.store(line + _DRAFTS, tl.where(is_live, drafts, 0))
    shown = tl.where(column < new, token, -1).to(tl.int32)
    tl.store(line + _TOKENS + column, shown, mask=column < longest)
    if kinds is not None:
        kind = tl.load(kinds + row)
        if token_counts is not None:
            is_counted = is_token & (column < accepted) & is_live & ((kind & PENALTIES) != 0)
            tl.atomic_add(token_counts + row * VOCAB + token, 2, mask=is_counted, sem="relaxed")
        if log_sums is not None:
            bits = line + _TOKENS + longest
            tl.store(bits + column, _NO_LOGPROB, mask=column < longest)
            if (kind & LOGPROBS) != 0:
                tl.debug_barrier()  # behind the stores above
                # Node by node: in a tile, the order of a sum depends on the number of nodes.
                for step in tl.range(0, new):
                    node = tl.load(accept_index + request * ACCEPTED + step).to(tl.int64)
                    predicted = tl.load(predict + request * width + step).to(tl.int64)
                    logprob = _logprob(node, predicted, logits, log_sums, row_stride,
                                       column_stride, parts, BLOCK_C)  # fmt: skip
                    tl.store(bits + step, logprob.to(tl.int32, bitcast=True))
    # Pads share row 0 and write nothing.
    last = tl.minimum(tl.maximum(accepted - 1, 0), longest - 1)
    bonus = tl.sum(tl.where(column == last, token, 0), 0)
    tl.store(seq_lens + row, tl.load(seq_lens + row) + accepted, mask=is_live)
    tl.store(bonus_tokens + row, bonus, mask=is_live)
    tl.store(remaining + row, tl.where(has_ended, 0, left - new), mask=is_live)


def launch_finish_step(args: Any) -> torch.Tensor:
    """Launch ``finish_step``."""
    requests, stops = len(args.req_pool_indices), args.stop_ids.shape[1]
    report = empty_report(args)
    width = len(args.predict) // requests if requests else 1
    logits, counts, index = args.logits, args.token_counts, args.accept_index
    parts = 1 if args.log_sums is None else args.log_sums.shape[1]
    launch(
        finish_step_kernel, (requests,), args, report=report, width=width,
        columns=report.shape[1], longest=args.longest_path, logits=logits,
        row_stride=0 if logits is None else logits.stride(0),
        column_stride=0 if logits is None else logits.stride(1), parts=parts,
        VOCAB=1 if counts is None else counts.shape[1],
        ACCEPTED=1 if index is None else index.shape[1],
        STOPS=stops, BLOCK_P=triton.next_power_of_2(args.longest_path),
        BLOCK_X=triton.next_power_of_2(stops), BLOCK_C=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return report
