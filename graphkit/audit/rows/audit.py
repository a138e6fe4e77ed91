"""Search for rows whose bits depend on anything but the row.

Rows of sample batches run alone, among others, at other places and in other numbers. Where the KV
slots of a target are known, prompts run whole, in chunks and side by side, and tokens run one by
one and as chains and trees of drafts, chains also packed. All runs are without a graph, which
changes no bits: the audit ``shadow`` compares replays with such runs. No tolerance applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, row_facts
from graphkit.audit.batch_variants import Requests
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.rows.known_rows import KnownRows, RowDifference, RowRun
from graphkit.audit.rows.sequences import sequences_of
from graphkit.graphs import SizeTable, StateSnapshot
from graphkit.records import count_of
from graphkit.records.audit import NOT_CHECKED, Audit
from graphkit.runners import Output, Runner
from graphkit.runners.comparison import Rounding, first_difference
from graphkit.runners.comparison.differences import even_owner
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget

_ADVICE = (
    "Compute it with a kernel whose sums do not depend on the rows of the batch, such as the ops "
    "that graphkit.models.load puts in place of linears, norms and attention."
)


def audit_rows(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report the first row of a mode whose bits are not those of its first run, and the module.

    Restores state and random numbers. Modes that draw random numbers are not compared: those belong
    to a row's place in the batch.
    """
    start = StateSnapshot(restorable_state(runner), runner.device)
    with log.check(Audit.ROWS, runner.mode.name) as check, start:
        known, skipped = KnownRows(), ""
        sizes = _sizes(target, runner)
        difference = _compare(known, runner, _sampled_runs(target, runner, sizes, start))
        if start.drew_random_numbers():
            check.text = (
                f"{NOT_CHECKED}the step draws random numbers, which belong to rows of a batch"
            )
            return
        if difference is None and runner.group is None:
            with sequences_of(target, runner, start) as sequences:
                skipped = sequences.skipped
                runs = (_compare(known, runner, text) for text in sequences.texts())
                difference = next(filter(None, runs), None)
        check.text = (
            f"{count_of(known.num_compared, 'comparison')} of bits in batches of up to "
            f"{count_of(sizes[-1], 'request')}"
        )
        if skipped:
            check.text += f"; no prompts, chains and trees: {skipped}"
        if difference is not None:
            _report(check, target, runner, difference)


def _compare(
    known: KnownRows, runner: Runner[Any, Any], runs: Iterator[tuple[RowRun, Output]]
) -> RowDifference | None:
    """Return the first difference of some runs; on several ranks all stop together."""
    for run, output in runs:
        difference = known.difference(run, output)
        if on_any_rank(runner, difference is not None):
            return difference
    return None


def _sizes(target: CaptureTarget, runner: Runner[Any, Any]) -> list[int]:
    """Return the numbers of requests to run: 1, and all sizes that the target captures."""
    table, largest = SizeTable(target.sizes.max_batch_size, target.batch_sizes), runner.table
    most = min(largest.largest, largest.max_batch_size)
    return sorted({1, most, *(size for size in (*table, *largest) if size <= most)})


def _sampled_runs(
    target: CaptureTarget, runner: Runner[Any, Any], sizes: Sequence[int], start: StateSnapshot
) -> Iterator[tuple[RowRun, Output]]:
    """Yield runs of parts of the largest sample batch: alone, in front, and reversed at the end."""
    most = sizes[-1]
    batch = target.batch(runner.mode, most, SEED)
    requests = Requests.from_batch(batch, runner.buffers.layouts, runner.buffers.capacity)
    orders = [[request] for request in sorted({0, most // 2, most - 1})]
    for size in sizes[1:]:
        orders += [[*range(size)], [*reversed(range(most - size, most))]]
    for order in orders:
        taken = requests.take(order)
        text = "alone" if len(order) == 1 else f"among {len(order)} requests, from {order[0]} on"
        names, counts = [f"request {request}" for request in order], taken.counts.tolist()
        fall_back = partial(runner.fall_back, taken.batch())
        run = RowRun(text, runner.step, order, names, counts, start.restore, fall_back)
        run.prepare()
        yield run, run.run()


def _report(
    check: Check, target: CaptureTarget, runner: Runner[Any, Any], difference: RowDifference
) -> None:
    expected, got = difference.rows
    rounding, field = Rounding(runner.sizes.dtype), difference.field
    differing = partial(first_difference, {field: expected}, {field: got}, even_owner(1), rounding)
    wrong, unit = differing(), difference.units[1]
    kind = FindingKind.DEPENDENCE_ON_THE_BATCH_SIZE
    if differing(rounding.most) is None:
        kind = kind.within_rounding
    first = None
    if runner.group is None:  # only one rank may see the difference
        first = difference.first_node(rounding, target.weights)
    cause = Cause(kind, first, runs=("the earlier run", "the later run"))
    # Zeros of different sign differ in no number.
    facts: dict[str, Any] = {} if wrong is None else row_facts(wrong)
    values = f"is {facts['after']} instead of {facts['before']}" if facts else "has other bits"
    text = (
        f"{difference.got.names[unit]}: {field} {values}: {difference.got.text}, and before "
        f"{difference.expected.text}.{cause.text}"
    )
    facts |= cause.facts(runner, runner.table.largest, target.weights)
    # This audit runs only where equal bits are asked for, so that rounding is an error here.
    facts |= {"severity": "error", "field": field, "advice": _ADVICE, "cause": cause.place}
    check.report(kind, text, **facts)
