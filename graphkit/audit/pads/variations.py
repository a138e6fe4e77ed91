"""What the audit of pads varies: contents of pads, earlier batches, and the order of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphkit.audit.batch_variants import Fill, fill_floats
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause, padding_cause
from graphkit.audit.pads.sample_batches import Previous, SampleBatches
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs import EqualStateRuns
from graphkit.audit.runs.first_node import FirstNode
from graphkit.records import count_of
from graphkit.runners.sample_batch import largest_number

FindCause = Callable[[FindingKind], Cause]
"""Returns the cause of a wrong replay whose variation shows a kind of finding."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A replay whose live rows must equal those of the first replay.

    Attributes:
        kind: Kind of finding that a wrong row shows.
        text: What differs from the first replay, such as ``with copies of row 0 in pad rows``.
        runs: Runs of the batch.
        find_cause: Returns the cause of a wrong row.
        previous: A batch to replay before it, and the captured size of that.
        order: Order of the requests, if they are reordered; live rows may then differ by rounding.
        judges_state: Whether to look for writes to state of other requests.
    """

    kind: FindingKind
    text: str
    runs: EqualStateRuns
    find_cause: FindCause
    previous: Previous | None = None
    order: Sequence[int] | None = None
    judges_state: bool = True


class LiveBatch:
    """A live batch at one captured size, and its variations.

    Args:
        samples: Draws the batch.
        size: The captured size.
        live: Number of live requests.

    Attributes:
        samples, size, live: The arguments of these names.
    """

    def __init__(self, samples: SampleBatches, size: int, live: int) -> None:
        self.samples, self.size, self.live = samples, size, live
        self._requests = samples.requests(live)
        self._batch = self._requests.batch()

    def runs(self, **options: Any) -> EqualStateRuns:
        """Return runs of the batch; options as for ``EqualStateRuns``."""
        return self.samples.runs(self._batch, self.size, **options)

    def repeated(self) -> Variation:
        """Return a replay without a change. The first replay is the same."""
        runs = self.runs(padded_batch=self._requests.padded(self.size))
        find_node = partial(runs.first_unstable_node, self.samples.weights)
        text = "in a second replay of the same batch"
        return Variation(FindingKind.NONDETERMINISTIC_STEP, text, runs, self.begins_at(find_node))

    def all(self) -> Iterator[Variation]:
        """Yield variations of pads and previous batches."""
        yield from self._pads()
        yield from self._previous_batches()

    def reordered(self) -> Iterator[Variation]:
        """Yield orders of the requests.

        Random numbers belong to row indices, so a step that draws some cannot be compared.
        """
        samples = self.samples
        if on_any_rank(samples.runner, samples.draws):
            return
        indices = range(self.live)
        orders = {tuple(reversed(indices)), (*indices[1:], *indices[:1])} - {tuple(indices)}
        for order in sorted(orders):
            yield Variation(
                FindingKind.ROWS_DEPEND_ON_BATCH_ORDER,
                f"with requests in the order {list(order)}",
                samples.runs(self._requests.take(order).batch(), self.size),
                partial(samples.cause_in_order, self._requests, order, self.size),
                order=order,
            )

    def begins_at(self, find_node: Callable[[], FirstNode | None]) -> FindCause:
        """Return a search for the cause that finds the first node alone."""
        # On several ranks only one may see the difference, and the others would wait.
        is_alone = self.samples.runner.group is None
        return lambda kind: Cause(kind, find_node() if is_alone else None)

    def _pads(self) -> Iterator[Variation]:
        """Vary the contents of pad rows, and of the memory that pad rows read."""
        state, requests = self.samples.state, self._requests
        for value in (math.nan, math.inf):
            batch = requests.padded(self.size, fill_floats(value))
            text = f"with {value} in pad rows and reserved slots"
            yield self._with_pads(text, batch, partial(state.poison, value))
        for content, fill in self._fills().items() if self.size > self.live else ():
            yield self._with_pads(
                f"with {content} in pad rows", requests.padded(self.size, fill), lambda: None
            )
        if on_any_rank(self.samples.runner, state.alias_reserved_row(self._batch)):
            text = "with slots of another request in the reserved row of a request table"
            alias_reserved_row = partial(state.alias_reserved_row, self._batch)
            yield self._with_pads(text, self._batch, alias_reserved_row, judges_state=False)

    def _with_pads(
        self, text: str, batch: Any, prepare: Callable[[], object], *, judges_state: bool = True
    ) -> Variation:
        runs = self.runs(padded_batch=batch, prepare=prepare)
        find_cause = partial(padding_cause, runs, self.samples.weights)
        return Variation(
            FindingKind.LEAKING_PAD_ROW, text, runs, find_cause, judges_state=judges_state
        )

    def _fills(self) -> dict[str, Fill]:
        runner, own = self.samples.runner, self._requests.rows
        ahead = runner.steps_ahead()
        other = self.samples.requests(self.size, variant=1).rows
        return {
            "the largest ids": lambda layout, _rows: largest_number(layout, runner.sizes, ahead),
            "copies of row 0": lambda layout, _rows: own[layout.name][:1],
            "rows of another batch": lambda layout, rows: other[layout.name][-len(rows) :],
        }

    def _previous_batches(self) -> Iterator[Variation]:
        """Replay other batches before, at this size and at the next smaller and larger ones."""
        sizes = self.samples.runner.table.sizes
        index = sizes.index(self.size)
        own = self._requests.padded(self.size), self.size
        for size in sizes[max(index - 1, 0) : index + 2]:
            is_own = size == self.size
            kind = (
                FindingKind.STALE_ROWS_OF_A_LARGER_BATCH if is_own else FindingKind.SIZES_INTERFERE
            )
            text = f"after a batch of {count_of(size, 'request')}"
            for variant in (1, 2) if is_own else (1,):
                previous, runs = (self.samples.draw(size, variant), size), self.runs()
                find_node = partial(self.samples.first_node_after, runs, (own, previous))
                yield Variation(kind, text, runs, self.begins_at(find_node), previous=previous)
