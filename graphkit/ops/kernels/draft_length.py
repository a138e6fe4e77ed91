"""Choice of drafts for CUDA. Contract: ``graphkit.ops.draft_length``.

One program: the work is a few hundred words, or a few thousand chances.
"""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.draft_length import (
    CATCH_UP_RESERVE,
    DECAY,
    DRIFT,
    FIRST_WEIGHT,
    IDLE_DECAY,
    LEAST_RATE,
    LEVELS,
    MOST_CREDIT,
    MOST_DRIFT,
    NEXT_WEIGHT,
    PRIOR,
    PROBE_SHARE,
    REQUEST_DECAY,
    REQUEST_WEIGHT,
)
from graphkit.ops.kernels.device_loop import smallest_body
from graphkit.ops.kernels.launch import launch
from graphkit.ops.loop_layout import Ledger, Report

_ROW = tl.constexpr(int(Report.ROW))
_ACCEPTED = tl.constexpr(int(Report.ACCEPTED))
_DRAFTS = tl.constexpr(int(Report.DRAFTS))
_NEW = tl.constexpr(int(Report.NEW))
_CREDIT = tl.constexpr(int(Ledger.CREDIT))
_PLAIN_TIME = tl.constexpr(int(Ledger.PLAIN_TIME))
_STEP_TIME = tl.constexpr(int(Ledger.STEP_TIME))
_CLOCK = tl.constexpr(int(Ledger.CLOCK))
_DECAY = tl.constexpr(DECAY)
_IDLE_DECAY = tl.constexpr(IDLE_DECAY)
_REQUEST_DECAY = tl.constexpr(REQUEST_DECAY)
_REQUEST_WEIGHT = tl.constexpr(REQUEST_WEIGHT)
_LEAST_RATE = tl.constexpr(LEAST_RATE)
_LEVELS = tl.constexpr(LEVELS)
_PRIOR = tl.constexpr(PRIOR)
_FIRST_WEIGHT = tl.constexpr(FIRST_WEIGHT)
_NEXT_WEIGHT = tl.constexpr(NEXT_WEIGHT)
_PROBE_SHARE = tl.constexpr(PROBE_SHARE)
_MOST_CREDIT = tl.constexpr(MOST_CREDIT)
_RESERVE = tl.constexpr(CATCH_UP_RESERVE)
_DRIFT = tl.constexpr(DRIFT)
_MOST_DRIFT = tl.constexpr(MOST_DRIFT)


@triton.jit
def _count_report(
    report, num_steps, acceptance, by_request, length, reported, columns, tables, positions,
    REPORT: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Add what a step accepted to the counts, in the table of its length and of each request."""
    each, position = tl.arange(0, REPORT), tl.arange(0, POSITIONS)
    row = tl.load(report + each * columns + _ROW, mask=each < reported, other=0)
    drafts = tl.load(report + each * columns + _ACCEPTED, mask=each < reported, other=0) - 1
    drafts = tl.where(row > 0, drafts, -1)
    steps = tl.load(num_steps + length)
    verified = tl.zeros_like(drafts) + steps
    if by_request is not None:
        verified = tl.load(report + each * columns + _DRAFTS, mask=each < reported, other=0)
    is_verified = position[None, :] < verified[:, None]
    is_reached = ((drafts[:, None] >= position[None, :]) & is_verified).to(tl.float32)
    is_kept = ((drafts[:, None] > position[None, :]) & is_verified).to(tl.float32)
    reached, kept = tl.sum(is_reached, 0), tl.sum(is_kept, 0)
    own = tl.where(tables > 1, length, 0)
    inside = position < positions
    for table in range(tables):
        decay = tl.where((table == own) & (steps > 0), _DECAY, _IDLE_DECAY)
        place = acceptance + (table * positions + position) * 2
        before = tl.load(place, mask=inside, other=0.0)
        kept_before = tl.load(place + 1, mask=inside, other=0.0)
        tl.store(place, decay * before + tl.where(table == own, reached, 0.0), mask=inside)
        tl.store(place + 1, decay * kept_before + tl.where(table == own, kept, 0.0), mask=inside)
    if by_request is not None:
        decay = tl.where(verified > 0, _REQUEST_DECAY, _IDLE_DECAY)[:, None]
        place = by_request + (row[:, None] * positions + position[None, :]) * 2
        is_own = (row > 0)[:, None] & inside[None, :]
        before = tl.load(place, mask=is_own, other=0.0)
        kept_before = tl.load(place + 1, mask=is_own, other=0.0)
        tl.store(place, decay * before + is_reached, mask=is_own)
        tl.store(place + 1, decay * kept_before + is_kept, mask=is_own)


@triton.jit
def _survival_levels(
    row, acceptance, by_request, positions, BLOCK: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    """Return the chances of the drafts of each request, int32 [BLOCK, POSITIONS], -1 for none."""
    column = tl.arange(0, POSITIONS)[None, :]
    levels = tl.full([BLOCK, POSITIONS], -1, tl.int32)
    path = tl.full([BLOCK], 1.0, tl.float32)
    own = tl.full([BLOCK], 1.0, tl.float32)
    rate = _PRIOR
    weight = _FIRST_WEIGHT
    for position in range(positions):
        before = rate
        rate = (tl.load(acceptance + position * 2 + 1) + weight * rate) / (
            tl.load(acceptance + position * 2) + weight
        )
        ratio = rate / tl.maximum(before, _LEAST_RATE)
        ratio = tl.where(position == 0, rate, ratio)
        weight = _NEXT_WEIGHT
        place = by_request + (row * positions + position) * 2
        tried = tl.load(place, mask=row > 0, other=0.0)
        right = tl.load(place + 1, mask=row > 0, other=0.0)
        own = (right + _REQUEST_WEIGHT * tl.minimum(own * ratio, 1.0)) / (tried + _REQUEST_WEIGHT)
        path *= own
        level = tl.where(row > 0, (path * _LEVELS).to(tl.int32), -1)
        levels = tl.where(column == position, level[:, None], levels)
    return levels


@triton.jit
def _last_level(levels, budget):
    """Return the chance of the last draft of a budget, if those with the best ones come first."""
    level = budget * 0
    for bit in tl.static_range(16):
        higher = level | (32768 >> bit)
        level = tl.where(tl.sum((levels >= higher).to(tl.int32)) >= budget, higher, level)
    return level


@triton.jit
def _expected_tokens(levels, steps, budget, live, POSITIONS: tl.constexpr):
    """Return the expected tokens of a request, in a step with so many drafts for all."""
    of_length = tl.where(tl.arange(0, POSITIONS)[None, :] < steps, levels, -1)
    total = tl.sum(tl.maximum(of_length, 0))
    if budget < live * steps:
        last = _last_level(of_length, budget)
        better = of_length > last
        total = tl.sum(tl.where(better, of_length, 0))
        total += (budget - tl.sum(better.to(tl.int32))) * last
    return 1.0 + total.to(tl.float32) / _LEVELS / tl.maximum(live, 1)


@triton.jit
def _divided_drafts(levels, steps, budget, POSITIONS: tl.constexpr):
    """Return the drafts of each request, int32 [BLOCK]; see ``divide_drafts``."""
    of_length = tl.where(tl.arange(0, POSITIONS)[None, :] < steps, levels, -1)
    last = _last_level(of_length, budget)
    better, equal = (of_length > last).to(tl.int32), (of_length == last).to(tl.int32)
    # Equal chances are taken by position, then by request.
    of_position = tl.sum(equal, 0)
    before = tl.cumsum(of_position, 0) - of_position
    place = before[None, :] + tl.cumsum(equal, 0)
    is_taken = (equal > 0) & (place <= budget - tl.sum(better))
    return tl.sum(better + is_taken.to(tl.int32), 1)


@triton.jit
def _clock_ns():
    """Return the clock of the device, int64 [1]; ``globaltimer`` is part of PTX since 3.1."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [tl.arange(0, 1).to(tl.int64)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _count_times(
    report, batch_sizes, num_steps, times, ledger, taken, variant, lengths, variants, reported,
    columns, bodies, REPORT: tl.constexpr, BODIES: tl.constexpr,
):  # fmt: skip
    """Add a step of live requests to the ledger, and its time to the times.

    ``taken`` is the time of the step, or 0 for the known one.
    """
    each = tl.arange(0, REPORT)
    row = tl.load(report + each * columns + _ROW, mask=each < reported, other=0)
    new = tl.load(report + each * columns + _NEW, mask=(each < reported) & (row > 0), other=0)
    live = tl.sum((row > 0).to(tl.int32), 0)
    if (live > 0) & (tl.load(num_steps) == 0):
        own = times + smallest_body(batch_sizes, reported, bodies, BODIES) * variants
        known = tl.load(own + variant).to(tl.float64)
        plain_time = tl.load(own).to(tl.float64)
        nearby = tl.minimum(tl.maximum(taken, known / _MOST_DRIFT), known * _MOST_DRIFT)
        drifted = tl.where(taken > 0, known + (nearby - known) * _DRIFT, known)
        plain_time = tl.where(variant == 0, drifted, plain_time)
        tokens = tl.sum(new, 0).to(tl.float64) / live
        gain = tl.where(variant == 0, 0.0, tokens - drifted / plain_time)
        credit = tl.load(ledger + _CREDIT) + _PROBE_SHARE + gain
        most = tl.load(num_steps + lengths - 1) + _MOST_CREDIT
        plain_sum = tl.load(ledger + _PLAIN_TIME) + tokens * plain_time
        step_sum = tl.load(ledger + _STEP_TIME) + tl.where(taken > 0, taken, known)
        tl.debug_barrier()  # all is read before it is written
        tl.store(own + variant, drifted.to(tl.float32))
        tl.store(ledger + _CREDIT, tl.minimum(credit, most))
        tl.store(ledger + _PLAIN_TIME, plain_sum)
        tl.store(ledger + _STEP_TIME, step_sum)


@triton.jit(
    do_not_specialize=[
        "variant", "depth", "requests", "bodies", "lengths", "variants", "tables", "positions",
        "reported", "columns",
    ]
)  # fmt: skip
def choose_body_kernel(
    rows, batch_sizes, num_steps, row_counts, times, acceptance, body, ledger, num_drafts,
    by_request, behind, report, variant, depth, requests, bodies, lengths, variants, tables,
    positions, reported, columns,
    BLOCK: tl.constexpr, BODIES: tl.constexpr, REPORT: tl.constexpr, POSITIONS: tl.constexpr,
    IS_TIMED: tl.constexpr,
):  # fmt: skip
    """One program."""
    taken = tl.load(ledger + _CLOCK) * 0.0
    if IS_TIMED:
        before = tl.load(ledger + _CLOCK)
        clock = tl.sum(_clock_ns(), 0).to(tl.float64)
        taken = tl.where(before > 0, (clock - before) / 1e3, taken)
        tl.debug_barrier()  # the clock is read before it is written
        tl.store(ledger + _CLOCK, clock)
    if report is not None:
        _count_report(
            report, num_steps, acceptance, by_request, tl.where(variant < lengths, variant, 0),
            reported, columns, tables, positions, REPORT, POSITIONS,
        )  # fmt: skip
        _count_times(
            report, batch_sizes, num_steps, times, ledger, taken, variant, lengths, variants,
            reported, columns, bodies, REPORT, BODIES,
        )  # fmt: skip
        tl.debug_barrier()  # the counts are written before they are read
    each = tl.arange(0, BLOCK)
    row = tl.load(rows + each, mask=each < requests, other=0)
    live = tl.sum((row > 0).to(tl.int32), 0)
    size = smallest_body(batch_sizes, live, bodies, BODIES)
    own = times + size * variants
    plain_time, credit = tl.load(own), tl.load(ledger + _CREDIT)
    has_plain = tl.load(num_steps) == 0
    most = live * 0
    catch_up = plain_time * 0.0
    if behind is not None:
        tokens = tl.load(behind + row, mask=row > 0, other=0)
        most = tl.max(tokens, 0)
        catch_up = tl.load(own + lengths) / plain_time - 1.0
    levels = tl.zeros([1, 1], tl.int32)
    if by_request is not None:
        levels = _survival_levels(row, acceptance, by_request, positions, BLOCK, POSITIONS)
    best_rate = -1.0
    wanted_rate = -1.0
    chosen = 0
    wanted = 0
    for index in range(lengths):
        steps = tl.load(num_steps + index)
        expected = 1.0
        if by_request is not None:
            spare = tl.load(row_counts + size * lengths + index) - live
            budget = tl.minimum(spare, live * steps)
            expected = _expected_tokens(levels, steps, budget, live, POSITIONS)
        else:
            table = tl.where(tables > 1, index, 0)
            path = 1.0
            acceptance_rate = _PRIOR
            weight = _FIRST_WEIGHT
            for position in range(steps):
                place = acceptance + (table * positions + position) * 2
                acceptance_rate = (tl.load(place + 1) + weight * acceptance_rate) / (
                    tl.load(place) + weight
                )
                weight = _NEXT_WEIGHT
                path *= acceptance_rate
                expected += path
        time = tl.load(own + index)
        rate = expected / time
        cost = time / plain_time - 1.0 + tl.where(most > 0, catch_up, 0.0)
        is_covered = (index == 0) | (has_plain == 0) | (credit >= cost)
        wanted = tl.where(rate > wanted_rate, index, wanted)
        wanted_rate = tl.maximum(rate, wanted_rate)
        is_better = is_covered & (rate > best_rate)
        chosen = tl.where(is_better, index, chosen)
        best_rate = tl.where(is_better, rate, best_rate)
    if behind is not None:
        is_due = (wanted == 0) & (most + 1 >= depth) & (credit >= catch_up + _RESERVE)
        catches_up = tl.where(chosen == 0, is_due, most > 0)
        chosen = tl.where(catches_up, lengths, chosen)
    tl.store(body, (size * variants + chosen).to(tl.int64))
    if by_request is not None:
        drafting = tl.minimum(chosen, lengths - 1)
        steps = tl.where(chosen < lengths, tl.load(num_steps + drafting), 0)
        spare = tl.load(row_counts + size * lengths + drafting) - live
        budget = tl.minimum(spare, live * steps)
        drafts = _divided_drafts(levels, steps, budget, POSITIONS)
        drafts = tl.where(steps > 0, drafts, 0)
        tl.store(num_drafts + each, tl.where(row > 0, drafts, -1), mask=each < requests)


def launch_choose_body(args: Any) -> None:
    """Launch ``choose_body``."""
    requests, bodies, lengths = len(args.rows), len(args.batch_sizes), len(args.num_steps)
    tables, positions, _ = args.acceptance.shape
    reported, columns = (0, 0) if args.report is None else args.report.shape
    launch(
        choose_body_kernel, (1,), args, requests=requests, bodies=bodies, lengths=lengths,
        variants=args.times.shape[1], tables=tables, positions=positions, reported=reported,
        columns=columns,
        BLOCK=triton.next_power_of_2(requests), BODIES=triton.next_power_of_2(bodies),
        REPORT=triton.next_power_of_2(max(reported, 1)),
        POSITIONS=triton.next_power_of_2(positions), IS_TIMED=args.is_timed, num_warps=4,
    )  # fmt: skip
