"""Choice of the draft length for CUDA. Contract: ``graphkit.ops.draft_length``.

One program: the work is a few hundred words.
"""

from typing import Any

import triton
import triton.language as tl

from graphkit.ops.draft_length import DECAY, IDLE_DECAY, PRIOR, PRIOR_WEIGHT
from graphkit.ops.kernels.device_loop import smallest_body
from graphkit.ops.kernels.launch import launch
from graphkit.ops.loop_layout import Report

_ROW = tl.constexpr(int(Report.ROW))
_ACCEPTED = tl.constexpr(int(Report.ACCEPTED))
_DECAY = tl.constexpr(DECAY)
_IDLE_DECAY = tl.constexpr(IDLE_DECAY)
_PRIOR = tl.constexpr(PRIOR)
_PRIOR_WEIGHT = tl.constexpr(PRIOR_WEIGHT)


@triton.jit
def _count_report(
    report, num_steps, acceptance, length, reported, columns, tables, positions,
    REPORT: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Add what a step accepted to the counts, in the table of its length."""
    each, position = tl.arange(0, REPORT), tl.arange(0, POSITIONS)
    row = tl.load(report + each * columns + _ROW, mask=each < reported, other=0)
    drafts = tl.load(report + each * columns + _ACCEPTED, mask=each < reported, other=0) - 1
    drafts = tl.where(row > 0, drafts, -1)
    steps = tl.load(num_steps + length)
    is_drafted = position < steps
    decay = tl.where(steps > 0, _DECAY, _IDLE_DECAY)
    reached = tl.sum((drafts[:, None] >= position[None, :]).to(tl.float32), 0)
    kept = tl.sum((drafts[:, None] > position[None, :]).to(tl.float32), 0)
    own = tl.where(tables > 1, length, 0)
    for table in range(tables):
        counts = is_drafted & (table == own)
        place = acceptance + (table * positions + position) * 2
        inside = position < positions
        before = tl.load(place, mask=inside, other=0.0)
        kept_before = tl.load(place + 1, mask=inside, other=0.0)
        tl.store(place, decay * before + tl.where(counts, reached, 0.0), mask=inside)
        tl.store(place + 1, decay * kept_before + tl.where(counts, kept, 0.0), mask=inside)


@triton.jit(
    do_not_specialize=[
        "length", "depth", "requests", "bodies", "lengths", "tables", "positions", "reported",
        "columns",
    ]
)  # fmt: skip
def choose_body_kernel(
    rows, batch_sizes, num_steps, times, acceptance, body, behind, report, length, depth,
    requests, bodies, lengths, tables, positions, reported, columns,
    BLOCK: tl.constexpr, BODIES: tl.constexpr, REPORT: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program."""
    if report is not None:
        _count_report(
            report, num_steps, acceptance, length, reported, columns, tables, positions,
            REPORT, POSITIONS,
        )  # fmt: skip
        tl.debug_barrier()  # the counts are written before they are read
    each = tl.arange(0, BLOCK)
    row = tl.load(rows + each, mask=each < requests, other=0)
    live = tl.sum((row > 0).to(tl.int32), 0)
    size = smallest_body(batch_sizes, live, bodies, BODIES)
    best_rate = -1.0
    chosen = 0
    for index in range(lengths):
        table = tl.where(tables > 1, index, 0)
        expected = 1.0
        path = 1.0
        acceptance_rate = _PRIOR
        for position in range(tl.load(num_steps + index)):
            place = acceptance + (table * positions + position) * 2
            acceptance_rate = (tl.load(place + 1) + _PRIOR_WEIGHT * acceptance_rate) / (
                tl.load(place) + _PRIOR_WEIGHT
            )
            path *= acceptance_rate
            expected += path
        rate = expected / tl.load(times + size * lengths + index)
        chosen = tl.where(rate > best_rate, index, chosen)
        best_rate = tl.maximum(rate, best_rate)
    if behind is None:
        tl.store(body, (size * lengths + chosen).to(tl.int64))
    else:
        tokens = tl.load(behind + row, mask=row > 0, other=0)
        most = tl.max(tokens, 0)
        is_plain = tl.load(num_steps + chosen) == 0
        catches_up = tl.where(is_plain, most + 1 >= depth, most > 0)
        chosen = tl.where(catches_up, lengths, chosen)
        tl.store(body, (size * (lengths + 1) + chosen).to(tl.int64))


def launch_choose_body(args: Any) -> None:
    """Launch ``choose_body``."""
    requests, bodies, lengths = len(args.rows), len(args.batch_sizes), len(args.num_steps)
    tables, positions, _ = args.acceptance.shape
    reported, columns = (0, 0) if args.report is None else args.report.shape
    launch(
        choose_body_kernel, (1,), args, requests=requests, bodies=bodies, lengths=lengths,
        tables=tables, positions=positions, reported=reported, columns=columns,
        BLOCK=triton.next_power_of_2(requests), BODIES=triton.next_power_of_2(bodies),
        REPORT=triton.next_power_of_2(max(reported, 1)),
        POSITIONS=triton.next_power_of_2(positions), num_warps=4,
    )  # fmt: skip
