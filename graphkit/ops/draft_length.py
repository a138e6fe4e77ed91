"""Choice of the drafts of the next step, from running acceptance and measured times.

A step drafts as many positions for each request as its *length* says, and verifies a number of rows
that is fixed when it is captured: one per request and those of drafts, which are divided among the
requests.

Layout of the results: ``graphkit.ops.loop_layout``.

Dimensions: M rows of a batch, L lengths with a number of rows each, V = L or L + 1 variants of a
step, G tables of acceptance, S positions, R request rows, B requests of a report, C its columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.loop_layout import Ledger, Report
from graphkit.ops.registration import register_op

DECAY = 0.995
"""Factor on the counts of a table in a step that drafts: they are a window of about 200 steps."""
IDLE_DECAY = 0.99
"""The same in other steps: after 69 of them, half of the counts are forgotten."""
PRIOR, FIRST_WEIGHT, NEXT_WEIGHT = 1.0, 4.0, 16.0
"""Acceptance of the first position before any draft, and how many observations a prior counts for,
that of the first position and those of the next ones, which are the acceptance of the one before.

High, so that drafts are tried. What trials may cost is bounded by ``Ledger.CREDIT``.
"""
PROBE_SHARE, FIRST_CREDIT, MOST_CREDIT, CATCH_UP_RESERVE = 0.005, 3.0, 8.0, 2.0
"""Credit that a step adds, of the first step, and the most, to which the positions of the longest
length are added; and what remains after a catch-up that no draft waits for."""
REQUEST_DECAY, REQUEST_WEIGHT = 0.98, 8.0
"""Factor on the counts of a request in a step that drafts for it, and how many observations the
acceptance of all requests counts for in its own."""
LEAST_RATE = 1e-6
"""Least acceptance that others are divided by."""
LEVELS = 65535
"""Chances that a draft is accepted are rounded down to multiples of one in so many."""
DRIFT, MOST_DRIFT = 1 / 16, 2.0
"""Weight of the last step in a measured time, and the most by which it counts as longer or shorter
than the time before."""


def clock_ns() -> int:
    """Return the clock that times steps on the CPU, in nanoseconds. Tests replace it."""
    return time.perf_counter_ns()


def new_ledger(device: torch.device) -> torch.Tensor:
    """Return the ledger before the first step, [4] float64."""
    return torch.tensor([FIRST_CREDIT, 0, 0, 0], dtype=torch.float64, device=device)


def expected_tokens(counts: Sequence[Sequence[float]]) -> list[float]:
    """Return the expected tokens of a request by number of drafts, from 0.

    Args:
        counts: Of each position, the drafts that reached it, and those that were accepted there.
    """
    expected, path, rate, weight = [1.0], 1.0, PRIOR, FIRST_WEIGHT
    for reached, kept in counts:
        rate = (kept + weight * rate) / (reached + weight)
        weight = NEXT_WEIGHT
        path *= rate
        expected.append(expected[-1] + path)
    return expected


def survival_levels(counts: torch.Tensor, of_requests: torch.Tensor) -> torch.Tensor:
    """Return the chance of each draft that it and all before it are accepted, in ``LEVELS``.

    The acceptance of a position has a prior, which counts for ``REQUEST_WEIGHT`` observations of
    the request. For the first position it is the acceptance of all requests, see ``choose_body``.
    For a later one it is the request's acceptance of the position before, times the same ratio of
    all requests, and at most 1: steps that draft little tell much of later positions, too. Chances
    do not rise from one position to the next.

    Args:
        counts: Counts of all requests, [S, 2] float32.
        of_requests: Counts of each request, [N, S, 2] float32.

    Returns:
        [N, S] int64.
    """
    rate, weight = torch.tensor(PRIOR), FIRST_WEIGHT
    own = path = torch.ones(len(of_requests))
    levels = []
    for position, (reached, kept) in enumerate(counts):
        before, rate = rate, (kept + weight * rate) / (reached + weight)
        ratio = rate if not position else rate / before.clamp(min=LEAST_RATE)
        weight = NEXT_WEIGHT
        tried, right = of_requests[:, position].unbind(1)
        own = (right + REQUEST_WEIGHT * (own * ratio).clamp(max=1)) / (tried + REQUEST_WEIGHT)
        path = path * own
        levels.append((path * LEVELS).long())
    return torch.stack(levels, 1)


def divide_drafts(levels: torch.Tensor, budget: int) -> torch.Tensor:
    """Return how many drafts each request gets of a number for all, [N] int64.

    The drafts with the best chances are verified; of equal ones those at earlier positions, then
    those of earlier requests. Since chances do not rise with the position, the drafts of a request
    are its first ones.

    Args:
        levels: ``survival_levels`` of the positions that are drafted, [N, D].
        budget: Drafts of all requests, at most N * D.
    """
    order = (-levels.t().flatten()).argsort(stable=True)[:budget]
    return order.remainder(max(len(levels), 1)).bincount(minlength=len(levels))


def choose_variant(
    expected: Sequence[float],
    times: Sequence[float],
    num_steps: Sequence[int],
    credit: float,
    behind: int | None,
    depth: int,
) -> int:
    """Return the index of the variant to run; see ``choose_body``.

    Args:
        expected: Expected tokens of each length.
        times: Times of the variants.
        num_steps: Positions of each length.
        credit: See ``Ledger.CREDIT``.
        behind: Most tokens that the draft model has yet to process; ``None`` without that variant.
        depth: Tokens that a catch-up processes.
    """
    plain_time, lengths = times[0], len(num_steps)
    catch_up = 0.0 if behind is None else times[lengths] / plain_time - 1
    chosen = wanted = 0
    for index in range(1, lengths):
        rate = expected[index] / times[index]
        cost = times[index] / plain_time - 1 + (catch_up if behind else 0)
        if rate > expected[wanted] / times[wanted]:
            wanted = index
        is_covered = num_steps[0] > 0 or credit >= cost
        if is_covered and rate > expected[chosen] / times[chosen]:
            chosen = index
    if behind is None or (chosen and not behind):
        return chosen
    if chosen:
        return lengths
    is_due = wanted == 0 and behind + 1 >= depth
    return lengths if is_due and credit >= CATCH_UP_RESERVE + catch_up else 0


def _check_variants(args: Any) -> None:
    """Check that times has a column per variant."""
    expected = len(args.num_steps) + (args.behind is not None)
    if (args.num_drafts is None) != (args.by_request is None):
        raise InputError(
            "choose_body: num_drafts and by_request are given together.", field="num_drafts"
        )
    if args.times.shape[1] != expected:
        raise InputError(
            f"choose_body: times is {describe(args.times)}, expected {expected} columns: one per "
            "length, and with behind one of a plain step that catches up.",
            field="times",
        )


@register_op(
    mutates_args=("times", "acceptance", "body", "ledger", "num_drafts", "by_request"),
    check=_check_variants,
)
def choose_body(
    rows: Annotated[torch.Tensor, "[M] int64"],
    batch_sizes: Annotated[torch.Tensor, "[sizes] int32"],
    num_steps: Annotated[torch.Tensor, "[L] int32"],
    row_counts: Annotated[torch.Tensor, "[sizes, L] int32, contiguous"],
    times: Annotated[torch.Tensor, "[sizes, V] float32, contiguous"],
    acceptance: Annotated[torch.Tensor, "[G, S, 2] float32, contiguous"],
    body: Annotated[torch.Tensor, "[1] int64"],
    ledger: Annotated[torch.Tensor, "[4] float64, contiguous"],
    num_drafts: Annotated[torch.Tensor | None, "[M] int32, contiguous"] = None,
    by_request: Annotated[torch.Tensor | None, "[R, S, 2] float32, contiguous"] = None,
    behind: Annotated[torch.Tensor | None, "[R] int32"] = None,
    depth: Annotated[int, "depth >= 1"] = 1,
    report: Annotated[torch.Tensor | None, "[B, C] int32"] = None,
    variant: int = 0,
    is_timed: bool = False,
) -> None:
    """Count what a step accepted, choose the body of the next one, and divide its drafts.

    Each position of a draft has two running counts: requests whose draft reached it, and requests
    that accepted it. A step multiplies those of the table of its length by ``DECAY`` if it drafts,
    all others by ``IDLE_DECAY``, and adds its own. The acceptance of a position is ``(accepted +
    weight * prior) / (reached + weight)``. The prior is the acceptance of the position before, with
    ``NEXT_WEIGHT``, and ``PRIOR`` for the first one, with ``FIRST_WEIGHT``. So a position without
    observations returns to its prior and is tried again. A length has as many expected tokens as 1
    plus, for each of its positions, the product of the acceptances up to it. The length with the
    most expected tokens per time is chosen; of equal ones, the first.

    With ``by_request``, drafts are chains, and each request has counts of its own; see
    ``survival_levels``. A step of N live requests and T rows verifies the T - N drafts with the
    best chances, at most as many per request as its length. The expected tokens are N and the
    chances of these drafts. Without live requests, the step with the least time is chosen.

    With a length 0, a *credit* bounds what drafts cost. It is counted in times of a plain step.
    Each step adds ``PROBE_SHARE`` and the tokens that a request received on average, and subtracts
    its own time. A longer draft runs only if the credit covers its time with every draft rejected.
    So at any time, all steps together have taken at most ``1 + PROBE_SHARE`` times the time of
    plain decoding, and ``FIRST_CREDIT`` steps.

    Plain steps may leave tokens to the draft model, which ``behind`` counts. Then one further
    variant, the last, is a plain step after which no request is behind. It runs before a longer
    draft, and before a request is ``depth`` tokens behind if the credit covers it and
    ``CATCH_UP_RESERVE``. A catch-up processes the last ``depth`` tokens of a request.

    Args:
        rows: Rows of the next step, then 0.
        batch_sizes: Captured sizes in ascending order.
        num_steps: Positions of each length, in ascending order.
        row_counts: Rows of a step by size and length; at least one per request. Read with
            ``by_request``.
        times: Time of a step by size and variant, in microseconds if ``is_timed``.
        acceptance: Counts of each position: reached and accepted. One table for all lengths, or one
            per length.
        body: Receives the index of the body: all variants of the first size, then of the next.
        ledger: See ``Ledger``. Changes in steps of live requests, if there is a length 0.
        num_drafts: Receives the drafts of each row that the next step verifies, -1 for pads.
        by_request: Counts of each request row, as in ``acceptance``; given with ``num_drafts``.
            ``None`` for trees.
        behind: Tokens that the draft model has yet to process, by request row; ``None`` if plain
            steps leave none, or if there is no length 0.
        depth: Tokens of a request that a catch-up processes.
        report: Report of the step that ran, see ``Report``; ``None`` if none ran.
        variant: Index of its variant.
        is_timed: Whether the step took the time since the call before, which then changes ``times``
            by ``DRIFT``.
    """
    tables, steps, sizes = len(acceptance), num_steps.tolist(), batch_sizes.tolist()
    length = variant if variant < len(steps) else 0
    elapsed = 0.0
    if is_timed:
        clock, before = clock_ns(), int(ledger[Ledger.CLOCK])
        elapsed = (clock - before) / 1e3 if before else 0.0
        ledger[Ledger.CLOCK] = clock
    if report is not None:
        lines = [row for row in report.tolist() if row[Report.ROW]]
        live_report = report[report[:, Report.ROW] > 0]
        verified = torch.full((len(lines), 1), steps[length])
        if by_request is not None:
            verified = live_report[:, Report.DRAFTS, None]
        position, kept = (
            torch.arange(acceptance.shape[1]),
            live_report[:, Report.ACCEPTED, None] - 1,
        )
        is_reached = (kept >= position) & (position < verified)
        new = torch.stack([is_reached, is_reached & (kept > position)], 2).float()  # [B, S, 2]
        own_table = length if tables > 1 else 0
        for table in range(tables):
            acceptance[table] *= DECAY if table == own_table and steps[length] else IDLE_DECAY
        acceptance[own_table] += new.sum(0)
        if by_request is not None:
            rows_of = live_report[:, Report.ROW].long()
            decay = torch.where(verified > 0, REQUEST_DECAY, IDLE_DECAY)[:, :, None]
            by_request[rows_of] = decay * by_request[rows_of] + new
        if lines and steps[0] == 0:
            own = times[_size_of(sizes, len(report))]
            known = taken = float(own[variant])
            if elapsed:
                taken = elapsed
                nearby = min(max(taken, known / MOST_DRIFT), known * MOST_DRIFT)
                own[variant] += DRIFT * (nearby - known)
            tokens = sum(row[Report.NEW] for row in lines) / len(lines)
            plain_time = float(own[0])
            credit = float(ledger[Ledger.CREDIT]) + PROBE_SHARE
            if variant:
                credit += tokens - float(own[variant]) / plain_time
            ledger[Ledger.CREDIT] = min(credit, MOST_CREDIT + steps[-1])
            ledger[Ledger.PLAIN_TIME] += tokens * plain_time
            ledger[Ledger.STEP_TIME] += taken
    running = [row for row in rows.tolist() if row]
    size, live = _size_of(sizes, len(running)), len(running)
    budgets = [0] * len(steps)
    levels = torch.zeros(0)
    if by_request is None:
        counts = acceptance.tolist()
        expected = [
            expected_tokens(counts[index if tables > 1 else 0][:count])[count]
            for index, count in enumerate(steps)
        ]
    else:
        levels = survival_levels(acceptance[0], by_request[running])
        spare = (row_counts[size] - live).tolist()
        budgets = [min(rest, live * count) for rest, count in zip(spare, steps, strict=True)]
        expected = []
        for budget, count in zip(budgets, steps, strict=True):
            best = levels[:, :count].flatten().sort(descending=True).values[:budget]
            expected.append(1 + int(best.sum()) / LEVELS / max(live, 1))
    most = None if behind is None else max((int(behind[row]) for row in running), default=0)
    chosen = choose_variant(
        expected, times[size].tolist(), steps, float(ledger[Ledger.CREDIT]), most, depth
    )
    body[0] = size * times.shape[1] + chosen
    if num_drafts is not None:
        num_drafts.fill_(-1)
        if live and chosen < len(steps):
            shares = divide_drafts(levels[:, : steps[chosen]], budgets[chosen])
            num_drafts[rows > 0] = shares.int()
        else:
            num_drafts[rows > 0] = 0


def _size_of(sizes: Sequence[int], requests: int) -> int:
    """Return the index of the smallest size that holds so many requests."""
    return min(sum(size < requests for size in sizes), len(sizes) - 1)
