"""Search for pad rows and earlier batches that affect live rows or declared state.

The audit replays each live batch many times at one captured size, always from the same state, with
different contents of its pad rows, after different batches, and in different orders. Live rows must
be equal; a difference within the rounding of the step is a note. Each replay may write only the
state rows of its batch and the reserved ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, requests_text, row_facts, row_text
from graphkit.audit.batch_variants import Fill, fill_floats
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.pads.sample_batches import Previous, SampleBatches, in_order
from graphkit.audit.pads.state_writes import Write
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs.equal_state_runs import EqualStateRuns, live_sizes
from graphkit.audit.runs.first_node import FirstNode
from graphkit.records import Mismatch, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding, first_difference
from graphkit.runners.comparison.differences import Tensors, even_owner
from graphkit.runners.sample_batch import largest_number
from graphkit.runners.targets import CaptureTarget


def audit_pads(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pad rows and earlier batches that affect live rows or declared state.

    Restores state and random numbers. Holds a copy of the target's ``mutable_state`` meanwhile;
    writes to other memory are not found.

    Raises:
        ReplayError: The runner is not captured.
    """
    with SampleBatches(target, runner) as samples:
        for size in runner.table:
            with log.check(Audit.PADS, runner.mode.name, size) as check:
                sizes = live_sizes(runner.table, size)
                batches = [LiveBatch(samples, size, live, log.tolerance) for live in sizes]
                _report(check, [wrong for b in batches for wrong in b.wrong_replays()], samples)
                replays = count_of(sum(batch.replays for batch in batches), "replay")
                check.text = (
                    f"{replays} of batches of {requests_text(sizes)}: varied pads, order and "
                    "previous batches"
                )


def _report(check: Check, replays: Sequence[WrongReplay], samples: SampleBatches) -> None:
    """Report one finding for each cause and each state tensor that is written."""
    groups: dict[tuple[FindingKind, str], list[WrongReplay]] = {}
    for replay in replays:
        name = replay.error.name if isinstance(replay.error, Write) else ""
        groups.setdefault((replay.kind, name), []).append(replay)
    by_cause: dict[tuple[FindingKind, str], tuple[Cause, list[WrongReplay]]] = {}
    for (_, name), group in groups.items():
        cause = group[0].variation.find_cause(group[0].kind)
        by_cause.setdefault((cause.kind, name), (cause, []))[1].extend(group)
    for (kind, name), (cause, (first, *others)) in by_cause.items():
        text, facts = _text_and_facts(first)
        more = f" {count_of(len(others), 'more replay')} went wrong like this." if others else ""
        facts |= {"cause": name or "output"}
        facts |= cause.facts(samples.runner, check.batch_size, samples.weights)
        check.report(kind, f"{text}{cause.text}{more}", **facts)


def _text_and_facts(replay: WrongReplay) -> tuple[str, dict[str, Any]]:
    error, text, live = replay.error, replay.variation.text, replay.variation.runs.batch.batch_size
    if isinstance(error, Write):
        text = (
            f"row {error.row} of state `{error.name}` changes from {error.before} to {error.after} "
            f"{text}, but belongs to no request of the batch ({count_of(live, 'live request')})."
        )
        facts = {"field": error.name, "before": error.before, "after": error.after}
        return text, {**facts, "row": error.row}
    facts = row_facts(error)
    text = f"{row_text(error, live)} is {facts['after']} instead of {facts['before']} {text}."
    if error.distance:
        text += (
            f" The distance is {error.distance}; the padded and the unpadded step differ by "
            f"{replay.natural_ulps:.3g} ulp."
        )
    return text, facts


@dataclass(frozen=True, slots=True)
class Variation:
    """A replay whose live rows must equal those of the first replay.

    Attributes:
        kind: Kind of finding that a wrong row shows.
        text: What differs from the first replay, such as ``with copies of row 0 in pad rows``.
        runs: Runs of the batch.
        find_cause: Returns the cause of a wrong row, by the kind of finding that it shows.
        previous: A batch to replay before it, and the captured size of that.
        order: Order of the requests, if they are reordered; live rows may then differ by rounding.
        judges_state: Whether to look for writes to state of other requests.
    """

    kind: FindingKind
    text: str
    runs: EqualStateRuns
    find_cause: Callable[[FindingKind], Cause]
    previous: Previous | None = None
    order: Sequence[int] | None = None
    judges_state: bool = True


@dataclass(frozen=True, slots=True)
class WrongReplay:
    """A replay that went wrong.

    Attributes:
        natural_ulps: Ulp by which the padded and the unpadded step differ without any graph.
    """

    kind: FindingKind
    variation: Variation
    error: Mismatch | Write
    natural_ulps: float = 0.0


class LiveBatch:
    """Replays variations of a live batch, and compares each with its first replay.

    Attributes:
        replays: Number of replays so far.
    """

    def __init__(self, samples: SampleBatches, size: int, live: int, tolerance: float) -> None:
        self._samples, self._runner, self._size = samples, samples.runner, size
        self._live, self._requests = live, samples.requests(live)
        self._batch, self.replays = self._requests.batch(), 0
        self._rounding = Rounding(self._runner.sizes.dtype, tolerance)
        self._expected: Tensors = {}
        self._stray_writes: list[WrongReplay] = []
        self._is_unstable = False

    def wrong_replays(self) -> Iterator[WrongReplay]:
        """Yield all wrong replays. A batch that differs beyond rounding is not varied further."""
        runs = self._runs(padded_batch=self._requests.padded(self._size))
        # All replays then follow one of this size.
        self._samples.leave(runs.padded_batch, self._size)
        self._expected = runs.replay()
        self.replays += 1
        find_cause = self._begins_at(partial(runs.first_unstable_node, self._samples.weights))
        text = "in a second replay of the same batch"
        repeated = Variation(FindingKind.NONDETERMINISTIC_STEP, text, runs, find_cause)
        unrepeated = list(self._compare(repeated))
        self._is_unstable = bool(unrepeated)
        yield from unrepeated
        rounding = FindingKind.NONDETERMINISTIC_ROUNDING
        if not on_any_rank(self._runner, any(wrong.kind is not rounding for wrong in unrepeated)):
            variations = chain(self._pads(), self._previous_batches())
            # All are replayed before the first cause is searched.
            yield from [wrong for variation in variations for wrong in self._compare(variation)]
            # Rounding may decide between two almost equally probable tokens in one order, so that
            # only a difference in every order is a bug.
            orders = [list(self._compare(variation)) for variation in self._reordered()]
            if orders and all(orders):
                yield orders[0][0]
        yield from self._stray_writes

    def _compare(self, variation: Variation) -> Iterator[WrongReplay]:
        """Replay a variation, and yield the first wrong row; collect a stray write."""
        kind, order = variation.kind, variation.order
        if variation.previous is not None:
            self._samples.leave(*variation.previous)
        got = variation.runs.replay()
        self.replays += 1
        if variation.judges_state:
            self._note_stray_write(variation)
        # Kernels may round by the index of a row, so that reordered rows differ by rounding.
        expected = self._expected if order is None else in_order(self._expected, order)
        owner = even_owner(self._live)
        differing = partial(first_difference, expected, got, owner, self._rounding)
        wrong = differing(self._rounding.beside(0.0))
        # Only where it may matter: the padded and the unpadded step take long.
        if on_any_rank(self._runner, wrong is not None):
            wrong = differing(self._rounding.beside(self._natural_ulps))
        if wrong is None and order is None and not self._is_unstable:
            kind, wrong = kind.within_rounding, differing()
        ulps = 0.0
        if on_any_rank(self._runner, wrong is not None and bool(wrong.distance)):
            ulps = self._natural_ulps  # all ranks run it for the text of one
        if wrong is not None:
            yield WrongReplay(kind, variation, wrong, ulps)

    def _note_stray_write(self, variation: Variation) -> None:
        write = self._samples.state.stray_write(variation.runs.padded_batch)
        if write is not None:
            find_node = partial(self._samples.first_stray_write, variation.runs, variation.previous)
            wrong = replace(variation, find_cause=self._begins_at(find_node))
            self._stray_writes.append(
                WrongReplay(FindingKind.WRITE_OUTSIDE_LIVE_SLOTS, wrong, write)
            )

    @cached_property
    def _natural_ulps(self) -> float:
        """Ulp by which the padded and the unpadded step differ without any graph."""
        runs = self._runs()
        runs.padded()
        runs.padding_difference()
        return runs.natural_ulps

    def _pads(self) -> Iterator[Variation]:
        """Vary the contents of pad rows, and of the memory that pad rows read."""
        state, requests = self._samples.state, self._requests
        for value in (math.nan, math.inf):
            batch = requests.padded(self._size, fill_floats(value))
            text = f"with {value} in pad rows and reserved slots"
            yield self._with_pads(text, batch, partial(state.poison, value))
        for content, fill in self._fills().items() if self._size > self._live else ():
            batch = requests.padded(self._size, fill)
            yield self._with_pads(f"with {content} in pad rows", batch)
        alias_reserved_row = partial(state.alias_reserved_row, self._batch)
        if on_any_rank(self._runner, alias_reserved_row()):
            text = "with slots of another request in the reserved row of a request table"
            yield self._with_pads(text, self._batch, alias_reserved_row, judges_state=False)

    def _with_pads(
        self,
        text: str,
        batch: Any,
        prepare: Callable[[], object] = lambda: None,
        *,
        judges_state: bool = True,
    ) -> Variation:
        runs = self._runs(padded_batch=batch, prepare=prepare)
        find_cause = partial(padding_cause, runs, self._samples.weights)
        return Variation(
            FindingKind.LEAKING_PAD_ROW, text, runs, find_cause, judges_state=judges_state
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

    def _previous_batches(self) -> Iterator[Variation]:
        """Replay other batches before, at this size and at the next smaller and larger ones."""
        sizes = self._runner.table.sizes
        index = sizes.index(self._size)
        own = self._requests.padded(self._size), self._size
        for size in sizes[max(index - 1, 0) : index + 2]:
            kind, variants = FindingKind.SIZES_INTERFERE, [1]
            if size == self._size:
                kind, variants = FindingKind.STALE_ROWS_OF_A_LARGER_BATCH, [1, 2]
            for variant in variants:
                previous, runs = (self._samples.draw(size, variant), size), self._runs()
                find_node = partial(self._samples.first_node_after, runs, (own, previous))
                text = f"after a batch of {count_of(size, 'request')}"
                yield Variation(kind, text, runs, self._begins_at(find_node), previous=previous)

    def _reordered(self) -> Iterator[Variation]:
        """Yield orders of the requests.

        Random numbers belong to row indices, so a step that draws some cannot be compared.
        """
        if on_any_rank(self._runner, self._samples.draws):
            return
        indices = range(self._live)
        orders = {tuple(reversed(indices)), (*indices[1:], *indices[:1])} - {tuple(indices)}
        for order in sorted(orders):
            yield Variation(
                FindingKind.ROWS_DEPEND_ON_BATCH_ORDER,
                f"with requests in the order {list(order)}",
                self._samples.runs(self._requests.take(order).batch(), self._size),
                partial(self._samples.cause_in_order, self._requests, order, self._size),
                order=order,
            )

    def _runs(self, **options: Any) -> EqualStateRuns:
        return self._samples.runs(self._batch, self._size, **options)

    def _begins_at(self, find_node: Callable[[], FirstNode | None]) -> Callable[..., Cause]:
        """Return a search for the cause that finds the first node alone."""
        # On several ranks only one may see the difference, and the others would wait.
        is_alone = self._runner.group is None
        return lambda kind: Cause(kind, find_node() if is_alone else None)
