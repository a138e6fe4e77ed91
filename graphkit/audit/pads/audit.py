"""Search for pad rows and earlier batches that affect live rows or declared state.

The audit replays each live batch many times at one captured size, always from the same state, with
different contents of its pad rows, after different batches, and in different orders. Live rows must
be equal; a difference within the rounding of the step is a note. Each replay may write only the
state rows of its batch and the reserved ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.batch_variants import Fill, worst_of
from graphkit.audit.bugs import Bug
from graphkit.audit.finding_text import requests_text
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.pads.findings import WrongReplay, report_wrong_replays
from graphkit.audit.pads.greedy_acceptance import accepted_drafts
from graphkit.audit.pads.trials import Tensors, Trials, in_order
from graphkit.audit.ranks import on_any_rank
from graphkit.records import Mismatch, count_of
from graphkit.runners import Runner
from graphkit.runners.sample_batch import largest_number
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget
from graphkit.verify import Rounding, first_difference
from graphkit.verify.differences import even_owner
from graphkit.verify.first_node import FirstNode

FindCause = Callable[[Bug], Cause]
"""Returns the cause of a wrong replay whose variation shows a class of bug."""
_TRY_ALL_UP_TO = 8
"""Captured sizes up to which every number of live requests is tried."""


def audit_pads(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pad rows and earlier batches that affect live rows or declared state.

    Restores state and random numbers. Holds a copy of the target's ``mutable_state`` meanwhile;
    writes to other memory are not found.

    Args:
        target: Draws the batches, and declares the state.
        runner: A runner of the target, captured.
        log: Collects the findings: one per size and class of bug.

    Raises:
        ReplayError: The runner is not captured.
    """
    with Trials(target, runner) as trials:
        smaller = 0
        for size in runner.table:
            with log.check("pads", runner.mode.name, size) as check:
                before, sizes = trials.count, live_sizes(size, smaller)
                wrong = [
                    each
                    for live in sizes
                    for each in _LiveBatch(trials, size, live, log.tolerance).audit()
                ]
                report_wrong_replays(check, wrong, runner, target.weights)
                replays = count_of(trials.count - before, "replay")
                check.text = (
                    f"{replays} of batches of {requests_text(sizes)}: varied pads, order and "
                    "previous batches"
                )
            smaller = size


def live_sizes(size: int, smaller: int) -> list[int]:
    """Return the numbers of live requests to try at a captured size: all, or ends and middle.

    Args:
        size: The captured size.
        smaller: The next smaller captured size, which normally replays batches up to it.
    """
    if size <= _TRY_ALL_UP_TO:
        return list(range(1, size + 1))
    return sorted({1, smaller + 1, size // 2, size - 1, size})


class _LiveBatch:
    """A live batch, replayed with variations at one captured size."""

    def __init__(self, trials: Trials, size: int, live: int, tolerance: float) -> None:
        self._trials, self._size, self._live = trials, size, live
        self._rounding = Rounding(trials.runner.sizes.dtype, tolerance)
        self._requests = trials.requests(live)
        self._batch = self._requests.batch()
        self._expected: Tensors = {}
        self._stray_writes: list[WrongReplay] = []
        self._is_unstable = False

    def audit(self) -> Iterator[WrongReplay]:
        """Yield all wrong replays. A batch that differs beyond rounding is not varied further."""
        padded = self._requests.padded(self._size)
        self._trials.leave(padded, self._size)  # all replays then follow one of this size
        self._expected = self._trials.run(padded, self._size, self._live)
        found = list(
            self._replay(
                Bug.NONDETERMINISTIC_STEP,
                "in a second replay of the same batch",
                padded,
                self._begins_at(
                    lambda: self._trials.first_node_after(padded, self._size, (None, None))
                ),
            )
        )
        self._is_unstable = bool(found)
        yield from found
        is_unusable = any(each.bug is not Bug.NONDETERMINISTIC_ROUNDING for each in found)
        if not self._on_any_rank(is_unusable):
            yield from [*self._vary_pads(), *self._vary_previous(), *self._vary_order()]
        yield from self._stray_writes

    @cached_property
    def _natural(self) -> float:
        """Ulp by which the padded and the unpadded step differ without any graph."""
        return self._trials.natural_rounding(self._batch, self._size)

    def _vary_pads(self) -> Iterator[WrongReplay]:
        """Vary the contents of pad rows, and of the memory that pad rows read."""
        state = self._trials.state
        for value in (math.nan, math.inf):
            batch = self._requests.padded(self._size, worst_of(value))
            variation = f"with {value} in pad rows and reserved slots"
            yield from self._replay_pads(variation, batch, partial(state.poison, value))
        for content, fill in self._fills().items() if self._size > self._live else ():
            batch = self._requests.padded(self._size, fill)
            yield from self._replay_pads(f"with {content} in pad rows", batch)
        if self._on_any_rank(state.alias_reserved_row(self._batch)):
            variation = "with slots of another request in the reserved row of a request table"
            alias_reserved_row = partial(state.alias_reserved_row, self._batch)
            yield from self._replay_pads(
                variation, self._batch, alias_reserved_row, judge_state=False
            )

    def _replay_pads(
        self,
        variation: str,
        batch: Any,
        prepare: Callable[[], object] = lambda: None,
        judge_state: bool = True,
    ) -> Iterator[WrongReplay]:
        trials = self._trials
        runs = trials.runs(self._batch, self._size, padded_batch=batch, prepare=prepare)
        yield from self._replay(
            Bug.LEAKING_PAD_ROW,
            variation,
            batch,
            partial(padding_cause, trials.runner, runs, trials.weights),
            prepare=prepare,
            judge_state=judge_state,
        )

    def _fills(self) -> dict[str, Fill]:
        runner, own = self._trials.runner, self._requests.rows
        ahead = runner.steps_ahead()
        other = self._trials.requests(self._size, which=1).rows
        return {
            "the largest ids": lambda layout, _rows: largest_number(layout, runner.sizes, ahead),
            "copies of row 0": lambda layout, _rows: own[layout.name][:1],
            "rows of another batch": lambda layout, rows: other[layout.name][-len(rows) :],
        }

    def _vary_previous(self) -> Iterator[WrongReplay]:
        """Replay other batches before, at this size and at the next smaller and larger ones."""
        sizes = self._trials.runner.table.sizes
        index = sizes.index(self._size)
        for size in sizes[max(index - 1, 0) : index + 2]:
            is_own = size == self._size
            bug = Bug.STALE_ROWS_OF_A_LARGER_BATCH if is_own else Bug.SIZES_INTERFERE
            variation = f"after a batch of {count_of(size, 'request')}"
            for which in (1, 2) if is_own else (1,):
                previous = self._trials.batch(size, which), size
                own = self._requests.padded(self._size), self._size
                find_node = partial(
                    self._trials.first_node_after, self._batch, self._size, (own, previous)
                )
                yield from self._replay(
                    bug, variation, self._batch, self._begins_at(find_node), previous=previous
                )

    def _vary_order(self) -> Iterator[WrongReplay]:
        """Reorder the requests, with tolerance: kernels may round by the index of a row.

        Rounding may decide between two almost equally probable tokens in one order, so that only a
        difference in every order is a bug. Random numbers belong to row indices, so a step that
        draws some cannot be compared.
        """
        if self._on_any_rank(self._trials.draws):
            return
        indices = range(self._live)
        orders = {tuple(reversed(indices)), (*indices[1:], *indices[:1])} - {tuple(indices)}
        found = [list(self._reorder(order)) for order in sorted(orders)]
        if found and all(found):
            yield found[0][0]

    def _reorder(self, order: Sequence[int]) -> Iterator[WrongReplay]:
        expected = in_order(self._expected, order)
        bug, variation = Bug.ROWS_DEPEND_ON_BATCH_ORDER, f"with requests in the order {list(order)}"
        is_alone = self._trials.runner.group is None
        find_cause = (
            partial(self._trials.cause_in_order, self._requests, order) if is_alone else Cause
        )
        yield from self._replay(
            bug, variation, self._requests.take(order).batch(), find_cause, reordered=expected
        )

    def _replay(
        self,
        bug: Bug,
        variation: str,
        batch: Any,
        find_cause: FindCause,
        *,
        previous: tuple[Any, int] | None = None,
        reordered: Tensors | None = None,
        prepare: Callable[[], object] = lambda: None,
        judge_state: bool = True,
    ) -> Iterator[WrongReplay]:
        """Replay a batch, and yield the first wrong row; collect a stray write.

        Args:
            bug: Class of bug that a wrong row shows.
            variation: What differs from the replay that gave the expected output.
            batch: The batch.
            find_cause: Returns the cause of a wrong row.
            previous: A batch to replay before it, and the captured size of that.
            reordered: Output to expect within rounding, instead of the first one in every bit.
            prepare: Called before the replay, when state is restored.
            judge_state: Whether to look for stray writes.
        """
        trials, live = self._trials, self._live
        if previous is not None:
            trials.leave(*previous)
        got = trials.run(batch, self._size, live, prepare)
        write = trials.state.stray_write(batch) if judge_state else None
        if write is not None:
            bug_of_write = Bug.WRITE_OUTSIDE_LIVE_SLOTS
            find_node = partial(trials.first_stray_write, batch, self._size, previous, prepare)
            find_writer = partial(self._begins_at(find_node), bug_of_write)
            self._stray_writes.append(
                WrongReplay(bug_of_write, variation, live, write, find_writer)
            )
        expected = self._expected if reordered is None else reordered
        differing = partial(first_difference, expected, got, even_owner(live), self._rounding)
        wrong = differing(self._rounding.beside(0.0))
        if self._on_any_rank(wrong is not None):  # the padded and the unpadded step take long
            wrong = differing(self._rounding.beside(self._natural))
        if wrong is None and reordered is None and not self._is_unstable:
            bug, wrong = bug.within_rounding, differing()
        if self._on_any_rank(wrong is not None and bool(wrong.distance)):
            _ = self._natural  # all ranks run it for the text of one
        if wrong is not None:
            consequence = self._distance(wrong)
            if wrong.field == "next_token_logits":
                consequence += self._acceptance(batch, expected, got)
            yield WrongReplay(bug, variation, live, wrong, partial(find_cause, bug), consequence)

    def _begins_at(self, find_node: Callable[[], FirstNode | None]) -> FindCause:
        # On several ranks only one may see the difference, and the others would wait.
        is_alone = self._trials.runner.group is None
        return lambda bug: Cause(bug, find_node() if is_alone else None)

    def _on_any_rank(self, is_needed: bool) -> bool:
        return on_any_rank(self._trials.runner, is_needed)

    def _distance(self, wrong: Mismatch) -> str:
        """Return a sentence on how far numbers differ, beside what the step itself rounds."""
        if not wrong.distance:
            return ""
        return (
            f" The distance is {wrong.distance}; the padded and the unpadded step differ by "
            f"{self._natural:.3g} ulp."
        )

    def _acceptance(self, batch: Any, expected: Tensors, got: Tensors) -> str:
        """Return a sentence if wrong logits of a verify change how many drafts are accepted."""
        runner = self._trials.runner
        if runner.mode is not ForwardMode.TARGET_VERIFY:
            return ""
        one, other = (
            accepted_drafts(runner.spec, batch, rows["next_token_logits"])
            for rows in (expected, got)
        )
        if one is None or other is None or torch.equal(one, other):
            return ""
        request = int((one != other).nonzero()[0])
        drafts = count_of(int(other[request]), "draft")
        return f" Request {request} then accepts {drafts} instead of {int(one[request])}."
