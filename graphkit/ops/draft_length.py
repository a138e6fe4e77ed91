"""Choice of the draft length of the next step, from running acceptance and measured times.

Layout of the results: ``graphkit.ops.loop_layout``.

Dimensions: M rows of a batch, L draft lengths, G tables of acceptance, S positions, R request rows,
B requests of a report, C its columns.
"""

from __future__ import annotations

from typing import Annotated

import torch

from graphkit.ops.loop_layout import Report
from graphkit.ops.registration import register_op

DECAY = 0.99
"""Factor on all counts in a step that drafts: they are a window of about 100 steps."""
IDLE_DECAY = 0.999
"""The same in a plain step: after 700 of them, half of the counts are forgotten.

Slower, because a draft that plain steps are interrupted for costs a part of a step.
"""
PRIOR, PRIOR_WEIGHT = 0.75, 4.0
"""Acceptance of the first position before any draft, and how many observations a prior counts for.

High, so that drafts are tried: if they lose, a few times ``PRIOR_WEIGHT`` tries show it.
"""


@register_op(mutates_args=("acceptance", "body"))
def choose_body(
    rows: Annotated[torch.Tensor, "[M] int64"],
    batch_sizes: Annotated[torch.Tensor, "[sizes] int32"],
    num_steps: Annotated[torch.Tensor, "[L] int32"],
    times: Annotated[torch.Tensor, "[sizes, L] float32, contiguous"],
    acceptance: Annotated[torch.Tensor, "[G, S, 2] float32, contiguous"],
    body: Annotated[torch.Tensor, "[1] int64"],
    behind: Annotated[torch.Tensor | None, "[R] int32"] = None,
    depth: Annotated[int, "depth >= 1"] = 1,
    report: Annotated[torch.Tensor | None, "[B, C] int32"] = None,
    length: int = 0,
) -> None:
    """Count what a step accepted, and choose the body of the next one.

    Each position of a draft has two running counts: requests whose draft reached it, and requests
    that accepted it. A step multiplies them by ``DECAY`` if it drafts, else by ``IDLE_DECAY``, and
    adds its own. The acceptance of a position is ``(accepted + PRIOR_WEIGHT *
    prior) / (reached + PRIOR_WEIGHT)``. The prior is the acceptance of the position before, and
    ``PRIOR`` for the first one, so that a position without observations returns to it and is tried
    again. A length has as many expected tokens as 1 plus, for each of its positions, the product of
    the acceptances up to it. The length with the most expected tokens per time is chosen; of equal
    ones, the first.

    Plain steps (length 0) may leave tokens to the draft model, which ``behind`` counts. Then one
    further body, the last of its size, is a plain step after which no request is behind. It runs
    before a longer draft, and before a request is ``depth`` tokens behind.

    Args:
        rows: Rows of the next step, then 0.
        batch_sizes: Captured sizes in ascending order.
        num_steps: Positions of each length, in ascending order.
        times: Time of a step by size and length, in any unit.
        acceptance: Counts of each position: reached and accepted. One table for all lengths, or one
            per length.
        body: Receives the index of the body: all bodies of the first size, then of the next.
        behind: Tokens that the draft model has yet to process, by request row; ``None`` if plain
            steps leave none, or if there is no length 0.
        depth: Most tokens that a request may be behind.
        report: Report of the step that ran, see ``Report``; ``None`` if none ran.
        length: Index of its length.
    """
    counts, steps = acceptance.tolist(), num_steps.tolist()
    tables = len(counts)
    if report is not None:
        decay = DECAY if steps[length] else IDLE_DECAY
        accepted = [row[Report.ACCEPTED] - 1 for row in report.tolist() if row[Report.ROW]]
        for table, positions in enumerate(counts):
            ran = steps[length] if table == (length if tables > 1 else 0) else 0
            for position, pair in enumerate(positions):
                reached = sum(drafts >= position for drafts in accepted) if position < ran else 0
                kept = sum(drafts > position for drafts in accepted) if position < ran else 0
                pair[:] = decay * pair[0] + reached, decay * pair[1] + kept
        acceptance.copy_(torch.tensor(counts))
    running = [row for row in rows.tolist() if row]
    size = min(sum(each < len(running) for each in batch_sizes.tolist()), len(batch_sizes) - 1)
    rates = []
    for index, (count, time) in enumerate(zip(steps, times[size].tolist(), strict=True)):
        expected = path = 1.0
        rate = PRIOR
        for reached, kept in counts[index if tables > 1 else 0][:count]:
            rate = (kept + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT)
            path *= rate
            expected += path
        rates.append(expected / time)
    chosen, bodies = rates.index(max(rates)), len(steps)
    if behind is not None:
        most = max((int(behind[row]) for row in running), default=0)
        if most + 1 >= depth if steps[chosen] == 0 else most > 0:
            chosen = bodies
        bodies += 1
    body[0] = size * bodies + chosen
