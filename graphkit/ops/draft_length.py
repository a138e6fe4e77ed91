"""Choice of the draft length of the next step, from running acceptance and measured times.

Layout of the results: ``graphkit.ops.loop_layout``.

Dimensions: M rows of a batch, L draft lengths, V = L or L + 1 variants of a step, G tables of
acceptance, S positions, R request rows, B requests of a report, C its columns.
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
    if args.times.shape[1] != expected:
        raise InputError(
            f"choose_body: times is {describe(args.times)}, expected {expected} columns: one per "
            "length, and with behind one of a plain step that catches up.",
            field="times",
        )


@register_op(mutates_args=("times", "acceptance", "body", "ledger"), check=_check_variants)
def choose_body(
    rows: Annotated[torch.Tensor, "[M] int64"],
    batch_sizes: Annotated[torch.Tensor, "[sizes] int32"],
    num_steps: Annotated[torch.Tensor, "[L] int32"],
    times: Annotated[torch.Tensor, "[sizes, V] float32, contiguous"],
    acceptance: Annotated[torch.Tensor, "[G, S, 2] float32, contiguous"],
    body: Annotated[torch.Tensor, "[1] int64"],
    ledger: Annotated[torch.Tensor, "[4] float64, contiguous"],
    behind: Annotated[torch.Tensor | None, "[R] int32"] = None,
    depth: Annotated[int, "depth >= 1"] = 1,
    report: Annotated[torch.Tensor | None, "[B, C] int32"] = None,
    variant: int = 0,
    is_timed: bool = False,
) -> None:
    """Count what a step accepted, and choose the body of the next one.

    Each position of a draft has two running counts: requests whose draft reached it, and requests
    that accepted it. A step multiplies those of the table of its length by ``DECAY`` if it drafts,
    all others by ``IDLE_DECAY``, and adds its own. The acceptance of a position is ``(accepted +
    weight * prior) / (reached + weight)``. The prior is the acceptance of the position before, with
    ``NEXT_WEIGHT``, and ``PRIOR`` for the first one, with ``FIRST_WEIGHT``. So a position without
    observations returns to its prior and is tried again. A length has as many expected tokens as 1
    plus, for each of its positions, the product of the acceptances up to it. The length with the
    most expected tokens per time is chosen; of equal ones, the first.

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
        times: Time of a step by size and variant, in microseconds if ``is_timed``.
        acceptance: Counts of each position: reached and accepted. One table for all lengths, or one
            per length.
        body: Receives the index of the body: all variants of the first size, then of the next.
        ledger: See ``Ledger``. Changes in steps of live requests, if there is a length 0.
        behind: Tokens that the draft model has yet to process, by request row; ``None`` if plain
            steps leave none, or if there is no length 0.
        depth: Tokens of a request that a catch-up processes.
        report: Report of the step that ran, see ``Report``; ``None`` if none ran.
        variant: Index of its variant.
        is_timed: Whether the step took the time since the call before, which then changes ``times``
            by ``DRIFT``.
    """
    counts, steps = acceptance.tolist(), num_steps.tolist()
    tables, sizes = len(counts), batch_sizes.tolist()
    length = variant if variant < len(steps) else 0
    elapsed = 0.0
    if is_timed:
        clock, before = clock_ns(), int(ledger[Ledger.CLOCK])
        elapsed = (clock - before) / 1e3 if before else 0.0
        ledger[Ledger.CLOCK] = clock
    if report is not None:
        lines = [row for row in report.tolist() if row[Report.ROW]]
        accepted = [row[Report.ACCEPTED] - 1 for row in lines]
        for table, positions in enumerate(counts):
            ran = steps[length] if table == (length if tables > 1 else 0) else 0
            decay = DECAY if ran else IDLE_DECAY
            for position, pair in enumerate(positions):
                reached = sum(drafts >= position for drafts in accepted) if position < ran else 0
                kept = sum(drafts > position for drafts in accepted) if position < ran else 0
                pair[:] = decay * pair[0] + reached, decay * pair[1] + kept
        acceptance.copy_(torch.tensor(counts))
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
    size = _size_of(sizes, len(running))
    expected = [
        expected_tokens(counts[index if tables > 1 else 0][:count])[count]
        for index, count in enumerate(steps)
    ]
    most = None if behind is None else max((int(behind[row]) for row in running), default=0)
    chosen = choose_variant(
        expected, times[size].tolist(), steps, float(ledger[Ledger.CREDIT]), most, depth
    )
    body[0] = size * times.shape[1] + chosen


def _size_of(sizes: Sequence[int], requests: int) -> int:
    """Return the index of the smallest size that holds so many requests."""
    return min(sum(size < requests for size in sizes), len(sizes) - 1)
