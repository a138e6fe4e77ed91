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

from graphkit.audit.audit_log import AuditLog, requests_text
from graphkit.audit.batch_variants import Fill, fill_floats
from graphkit.audit.bugs import Bug
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.pads.findings import (
    WrongReplay,
    acceptance_text,
    distance_text,
    report_wrong_replays,
)
from graphkit.audit.pads.sample_batches import Previous, SampleBatches, in_order
from graphkit.audit.ranks import on_any_rank
from graphkit.records import count_of
from graphkit.runners import Runner
from graphkit.runners.sample_batch import largest_number
from graphkit.targets import CaptureTarget
from graphkit.verify import EqualStateRuns, Rounding, first_difference, live_sizes
from graphkit.verify.differences import Tensors, even_owner
from graphkit.verify.first_node import FirstNode

FindCause = Callable[[Bug], Cause]
"""Returns the cause of a wrong replay whose variation shows a class of bug."""


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
    with SampleBatches(target, runner) as samples:
        for size in runner.table:
            with log.check("pads", runner.mode.name, size) as check:
                sizes = live_sizes(runner.table, size)
                batches = [_LiveBatch(samples, size, live, log.tolerance) for live in sizes]
                wrong = [replay for batch in batches for replay in batch.audit()]
                report_wrong_replays(check, wrong, runner, target.weights)
                replays = count_of(sum(batch.replays for batch in batches), "replay")
                check.text = (
                    f"{replays} of batches of {requests_text(sizes)}: varied pads, order and "
                    "previous batches"
                )


class _LiveBatch:
    """A live batch, replayed with variations at one captured size.

    Attributes:
        replays: Number of replays that were compared so far.
    """

    def __init__(self, samples: SampleBatches, size: int, live: int, tolerance: float) -> None:
        self._samples, self._size, self._live = samples, size, live
        self._runner, self.replays = samples.runner, 0
        self._rounding = Rounding(samples.runner.sizes.dtype, tolerance)
        self._requests = samples.requests(live)
        self._batch = self._requests.batch()
        self._expected: Tensors = {}
        self._stray_writes: list[WrongReplay] = []
        self._is_unstable = False

    def audit(self) -> Iterator[WrongReplay]:
        """Yield all wrong replays. A batch that differs beyond rounding is not varied further."""
        padded = self._requests.padded(self._size)
        runs = self._runs(padded_batch=padded)
        self._samples.leave(padded, self._size)  # all replays then follow one of this size
        self._expected = self._replayed(runs)
        find_node = partial(runs.first_unstable_node, self._samples.weights)
        found = list(
            self._replay(
                Bug.NONDETERMINISTIC_STEP,
                "in a second replay of the same batch",
                runs,
                self._begins_at(find_node),
            )
        )
        self._is_unstable = bool(found)
        yield from found
        is_unusable = any(wrong.bug is not Bug.NONDETERMINISTIC_ROUNDING for wrong in found)
        if not self._on_any_rank(is_unusable):
            yield from [*self._vary_pads(), *self._vary_previous(), *self._vary_order()]
        yield from self._stray_writes

    @cached_property
    def _natural_ulps(self) -> float:
        """Ulp by which the padded and the unpadded step differ without any graph."""
        runs = self._runs()
        runs.padded()
        runs.padding_difference()
        return runs.natural_ulps

    def _vary_pads(self) -> Iterator[WrongReplay]:
        """Vary the contents of pad rows, and of the memory that pad rows read."""
        state = self._samples.state
        for value in (math.nan, math.inf):
            batch = self._requests.padded(self._size, fill_floats(value))
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
        runs = self._runs(padded_batch=batch, prepare=prepare)
        find_cause = partial(padding_cause, runs, self._samples.weights)
        yield from self._replay(
            Bug.LEAKING_PAD_ROW, variation, runs, find_cause, judge_state=judge_state
        )

    def _fills(self) -> dict[str, Fill]:
        runner, own = self._runner, self._requests.rows
        ahead = runner.steps_ahead()
        other = self._samples.requests(self._size, variant=1).rows
        return {
            "the largest ids": lambda layout, _rows: largest_number(layout, runner.sizes, ahead),
            "copies of row 0": lambda layout, _rows: own[layout.name][:1],
            "rows of another batch": lambda layout, rows: other[layout.name][-len(rows) :],
        }

    def _vary_previous(self) -> Iterator[WrongReplay]:
        """Replay other batches before, at this size and at the next smaller and larger ones."""
        sizes = self._runner.table.sizes
        index = sizes.index(self._size)
        for size in sizes[max(index - 1, 0) : index + 2]:
            is_own = size == self._size
            bug = Bug.STALE_ROWS_OF_A_LARGER_BATCH if is_own else Bug.SIZES_INTERFERE
            variation = f"after a batch of {count_of(size, 'request')}"
            for variant in (1, 2) if is_own else (1,):
                previous = self._samples.draw(size, variant), size
                own = self._requests.padded(self._size), self._size
                runs = self._runs()
                find_node = partial(self._samples.first_node_after, runs, (own, previous))
                yield from self._replay(
                    bug, variation, runs, self._begins_at(find_node), previous=previous
                )

    def _vary_order(self) -> Iterator[WrongReplay]:
        """Reorder the requests, with tolerance: kernels may round by the index of a row.

        Rounding may decide between two almost equally probable tokens in one order, so that only a
        difference in every order is a bug. Random numbers belong to row indices, so a step that
        draws some cannot be compared.
        """
        if self._on_any_rank(self._samples.draws):
            return
        indices = range(self._live)
        orders = {tuple(reversed(indices)), (*indices[1:], *indices[:1])} - {tuple(indices)}
        found = [list(self._reorder(order)) for order in sorted(orders)]
        if found and all(found):
            yield found[0][0]

    def _reorder(self, order: Sequence[int]) -> Iterator[WrongReplay]:
        samples = self._samples
        yield from self._replay(
            Bug.ROWS_DEPEND_ON_BATCH_ORDER,
            f"with requests in the order {list(order)}",
            samples.runs(self._requests.take(order).batch(), self._size),
            partial(samples.cause_in_order, self._requests, order, self._size),
            reordered=in_order(self._expected, order),
        )

    def _runs(self, **options: Any) -> EqualStateRuns:
        return self._samples.runs(self._batch, self._size, **options)

    def _replayed(self, runs: EqualStateRuns) -> Tensors:
        self.replays += 1
        return runs.replay()

    def _replay(
        self,
        bug: Bug,
        variation: str,
        runs: EqualStateRuns,
        find_cause: FindCause,
        *,
        previous: Previous | None = None,
        reordered: Tensors | None = None,
        judge_state: bool = True,
    ) -> Iterator[WrongReplay]:
        """Replay a batch, and yield the first wrong row; collect a stray write.

        Args:
            bug: Class of bug that a wrong row shows.
            variation: What differs from the replay that gave the expected output.
            runs: Runs of the batch.
            find_cause: Returns the cause of a wrong row.
            previous: A batch to replay before it, and the captured size of that.
            reordered: Output to expect within rounding, instead of the first one in every bit.
            judge_state: Whether to look for stray writes.
        """
        samples, live, batch = self._samples, self._live, runs.padded_batch
        if previous is not None:
            samples.leave(*previous)
        got = self._replayed(runs)
        write = samples.state.stray_write(batch) if judge_state else None
        if write is not None:
            bug_of_write = Bug.WRITE_OUTSIDE_LIVE_SLOTS
            find_node = partial(samples.first_stray_write, runs, previous)
            find_writer = partial(self._begins_at(find_node), bug_of_write)
            self._stray_writes.append(
                WrongReplay(bug_of_write, variation, live, write, find_writer)
            )
        expected = self._expected if reordered is None else reordered
        differing = partial(first_difference, expected, got, even_owner(live), self._rounding)
        wrong = differing(self._rounding.beside(0.0))
        if self._on_any_rank(wrong is not None):  # the padded and the unpadded step take long
            wrong = differing(self._rounding.beside(self._natural_ulps))
        if wrong is None and reordered is None and not self._is_unstable:
            bug, wrong = bug.within_rounding, differing()
        if self._on_any_rank(wrong is not None and bool(wrong.distance)):
            _ = self._natural_ulps  # all ranks run it for the text of one
        if wrong is not None:
            consequence = distance_text(wrong, self._natural_ulps) if wrong.distance else ""
            if wrong.field == "next_token_logits":
                consequence += acceptance_text(self._runner, batch, expected, got)
            yield WrongReplay(bug, variation, live, wrong, partial(find_cause, bug), consequence)

    def _begins_at(self, find_node: Callable[[], FirstNode | None]) -> FindCause:
        # On several ranks only one may see the difference, and the others would wait.
        is_alone = self._runner.group is None
        return lambda bug: Cause(bug, find_node() if is_alone else None)

    def _on_any_rank(self, is_needed: bool) -> bool:
        return on_any_rank(self._runner, is_needed)
