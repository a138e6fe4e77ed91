"""Search for pad rows and earlier batches that affect live rows or declared state.

The audit replays each live batch many times at one captured size, always from the same state, with
different contents of its pad rows, after different batches, and in different orders. Live rows must
be equal; a difference within the rounding of the step is a note. Each replay may write only the
state rows of its batch and the reserved ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.pads.findings import (
    WrongReplay,
    acceptance_text,
    distance_text,
    report_wrong_replays,
)
from graphkit.audit.pads.sample_batches import SampleBatches, in_order
from graphkit.audit.pads.variations import LiveBatch, Variation
from graphkit.audit.places import requests_text
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs import EqualStateRuns, live_sizes
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding, first_difference
from graphkit.runners.comparison.differences import Tensors, even_owner
from graphkit.runners.targets import CaptureTarget


def audit_pads(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pad rows and earlier batches that affect live rows or declared state.

    Restores state and random numbers. Holds a copy of the target's ``mutable_state`` meanwhile;
    writes to other memory are not found.

    Args:
        target: Draws the batches, and declares the state.
        runner: A runner of the target, captured.
        log: Collects the findings: one per size and kind of finding.

    Raises:
        ReplayError: The runner is not captured.
    """
    with SampleBatches(target, runner) as samples:
        for size in runner.table:
            with log.check(Audit.PADS, runner.mode.name, size) as check:
                sizes = live_sizes(runner.table, size)
                audits = [
                    _BatchAudit(LiveBatch(samples, size, live), log.tolerance) for live in sizes
                ]
                wrong = [replay for audit in audits for replay in audit.wrong_replays()]
                report_wrong_replays(check, wrong, runner, target.weights)
                replays = count_of(sum(audit.replays for audit in audits), "replay")
                check.text = (
                    f"{replays} of batches of {requests_text(sizes)}: varied pads, order and "
                    "previous batches"
                )


class _BatchAudit:
    """Replays a live batch with variations, and compares each with the first replay.

    Attributes:
        replays: Number of replays so far.
    """

    def __init__(self, batch: LiveBatch, tolerance: float) -> None:
        self._batch, self._samples = batch, batch.samples
        self._runner, self.replays = batch.samples.runner, 0
        self._rounding = Rounding(self._runner.sizes.dtype, tolerance)
        self._expected: Tensors = {}
        self._stray_writes: list[WrongReplay] = []
        self._is_unstable = False

    def wrong_replays(self) -> Iterator[WrongReplay]:
        """Yield all wrong replays. A batch that differs beyond rounding is not varied further."""
        batch, first = self._batch, self._batch.repeated()
        # All replays then follow one of this size.
        self._samples.leave(first.runs.padded_batch, batch.size)
        self._expected = self._replayed(first.runs)
        unrepeated = list(self._compare(first))
        self._is_unstable = bool(unrepeated)
        yield from unrepeated
        is_unusable = any(
            wrong.kind is not FindingKind.NONDETERMINISTIC_ROUNDING for wrong in unrepeated
        )
        if not self._on_any_rank(is_unusable):
            # All are replayed before the first cause is searched.
            yield from [wrong for variation in batch.all() for wrong in self._compare(variation)]
            # Rounding may decide between two almost equally probable tokens in one order, so that
            # only a difference in every order is a bug.
            orders = [list(self._compare(variation)) for variation in batch.reordered()]
            if orders and all(orders):
                yield orders[0][0]
        yield from self._stray_writes

    @cached_property
    def _natural_ulps(self) -> float:
        """Ulp by which the padded and the unpadded step differ without any graph."""
        runs = self._batch.runs()
        runs.padded()
        runs.padding_difference()
        return runs.natural_ulps

    def _replayed(self, runs: EqualStateRuns) -> Tensors:
        self.replays += 1
        return runs.replay()

    def _compare(self, variation: Variation) -> Iterator[WrongReplay]:
        """Replay a variation, and yield the first wrong row; collect a stray write."""
        kind, runs, order = variation.kind, variation.runs, variation.order
        if variation.previous is not None:
            self._samples.leave(*variation.previous)
        got = self._replayed(runs)
        if variation.judges_state:
            self._note_stray_write(variation)
        # Kernels may round by the index of a row, so that reordered rows differ by rounding.
        expected = self._expected if order is None else in_order(self._expected, order)
        differing = partial(
            first_difference, expected, got, even_owner(self._batch.live), self._rounding
        )
        wrong = differing(self._rounding.beside(0.0))
        if self._on_any_rank(wrong is not None):  # the padded and the unpadded step take long
            wrong = differing(self._rounding.beside(self._natural_ulps))
        if wrong is None and order is None and not self._is_unstable:
            kind, wrong = kind.within_rounding, differing()
        if self._on_any_rank(wrong is not None and bool(wrong.distance)):
            _ = self._natural_ulps  # all ranks run it for the text of one
        if wrong is not None:
            consequence = distance_text(wrong, self._natural_ulps) if wrong.distance else ""
            if wrong.field == "next_token_logits":
                consequence += acceptance_text(self._runner, runs.padded_batch, expected, got)
            find_cause = partial(variation.find_cause, kind)
            yield WrongReplay(
                kind, variation.text, self._batch.live, wrong, find_cause, consequence
            )

    def _note_stray_write(self, variation: Variation) -> None:
        write = self._samples.state.stray_write(variation.runs.padded_batch)
        if write is not None:
            kind = FindingKind.WRITE_OUTSIDE_LIVE_SLOTS
            find_node = partial(self._samples.first_stray_write, variation.runs, variation.previous)
            find_cause = partial(self._batch.begins_at(find_node), kind)
            self._stray_writes.append(
                WrongReplay(kind, variation.text, self._batch.live, write, find_cause)
            )

    def _on_any_rank(self, is_needed: bool) -> bool:
        return on_any_rank(self._runner, is_needed)
