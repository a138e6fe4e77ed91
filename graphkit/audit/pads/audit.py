"""Whether pad rows, and what earlier batches left behind, can reach live rows or declared state.

A live batch is replayed again and again at one captured size, each time from the same state, with
other contents in its pad rows, after other batches, in another order. Live rows must come out equal
to the bit. After each replay state is looked at: only rows that the batch names, and the dummy's,
may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.pads.batch_variants import Fill, largest_number, worst_of
from graphkit.audit.pads.bugs import Bug, Case, tell
from graphkit.audit.pads.greedy_acceptance import accepted_drafts
from graphkit.audit.pads.trials import Tensors, Trials
from graphkit.runners import Runner
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget
from graphkit.targets.compare import first_difference, tolerance

_ALL_UP_TO = 8
"""Sizes for which every live batch size is tried."""


def audit_pads(target: CaptureTarget, runner: Runner[Any], log: AuditLog) -> None:
    """Replay live batches of every captured size with pads, leftovers and places varied.

    State, random numbers and shadow mode are put back. Holds a copy of the target's ``state``
    meanwhile, which alone is looked at for writes.

    Args:
        target: Makes the batches, and says what is state.
        runner: One of the target's, captured.
        log: Takes what is found: one finding per size and class of bug.

    Raises:
        ReplayError: The runner is not captured.
    """
    with Trials(target, runner) as trials:
        smaller = 0
        for size in runner.table:
            with log.check("pads", runner.mode.name, size) as check:
                before, lives = trials.count, live_sizes(size, smaller)
                tell(check, [case for live in lives for case in _Audit(trials, size, live).cases()])
                check.text = (
                    f"{trials.count - before} replays with {_listed(lives)} live requests: other "
                    "pads, leftovers, order, and sizes before"
                )
            smaller = size


def live_sizes(size: int, smaller: int) -> list[int]:
    """The live batch sizes to try at a captured size: all, or the ends and the middle.

    Args:
        size: The captured size.
        smaller: The next smaller one; batches up to it seldom run here.
    """
    if size <= _ALL_UP_TO:
        return list(range(1, size + 1))
    return sorted({1, smaller + 1, size // 2, size - 1, size})


class _Audit:
    """One live batch at one captured size."""

    def __init__(self, trials: Trials, size: int, live: int) -> None:
        self._trials, self._size, self._live = trials, size, live
        self._requests = trials.requests(live)
        self._batch = self._requests.batch()
        self._expected: Tensors = {}
        self._writes: list[Case] = []

    def cases(self) -> Iterator[Case]:
        """Everything that goes wrong."""
        padded = self._requests.padded(self._size)
        self._trials.leave(padded, self._size)  # so that all begin behind a replay of this size
        self._expected = self._trials.run(padded, self._size, self._live)
        found = list(self._try(Bug.REPLAYS_DIFFER_BY_THEMSELVES, "", padded))
        if not found:  # else all of the following would differ as well
            found = [*self._pads(), *self._leftovers(), *self._places()]
        yield from found
        yield from self._writes

    def _pads(self) -> Iterator[Case]:
        """Other contents in pad rows and in what pad rows read."""
        state, bug = self._trials.state, Bug.LEAKING_PAD_ROW
        for value in (math.nan, math.inf):
            batch = self._requests.padded(self._size, worst_of(value))
            what = f"{value} in pad rows and dummy slots"
            yield from self._try(bug, what, batch, prepare=partial(state.poison, value))
        for what, fill in self._fillings().items() if self._size > self._live else ():
            batch = self._requests.padded(self._size, fill)
            yield from self._try(bug, f"{what} in pad rows", batch)
        if state.mislead(self._batch):
            what = "other slots in the dummy's row of a request table"
            mislead = partial(state.mislead, self._batch)
            yield from self._try(bug, what, self._batch, prepare=mislead, watch=False)

    def _fillings(self) -> dict[str, Fill]:
        runner, own = self._trials.runner, self._requests.rows
        ahead = runner.steps_ahead()
        other = self._trials.requests(self._size, which=1).rows
        return {
            "the largest ids": lambda layout, _rows: largest_number(layout, runner.sizes, ahead),
            "copies of row 0": lambda layout, _rows: own[layout.name][:1],
            "rows of another batch": lambda layout, rows: other[layout.name][-len(rows) :],
        }

    def _leftovers(self) -> Iterator[Case]:
        """After other batches, at this size and at its neighbours."""
        sizes = self._trials.runner.table.sizes
        at = sizes.index(self._size)
        for size in sizes[max(at - 1, 0) : at + 2]:
            is_own = size == self._size
            bug = Bug.STALE_ROWS_OF_A_LARGER_BATCH if is_own else Bug.SIZES_DISTURB_EACH_OTHER
            for which in (1, 2) if is_own else (1,):
                before = self._trials.batch(size, which), size
                what = f"a batch of {size} requests just before"
                yield from self._try(bug, what, self._batch, before=before)

    def _places(self) -> Iterator[Case]:
        """In another order, with tolerance: kernels may round by place.

        Where rounding decides between two tokens that are almost equally likely, one order may
        differ. A bug shows in every order. Random numbers belong to places, so with them there is
        nothing to compare.
        """
        if self._trials.draws:
            return
        each = range(self._live)
        orders = sorted({tuple(reversed(each)), (*each[1:], *each[:1])} - {tuple(each)})
        found = [list(self._in_order(order)) for order in orders]
        if found and all(found):
            yield found[0][0]

    def _in_order(self, order: Sequence[int]) -> Iterator[Case]:
        expected = {
            name: rows.unflatten(0, (self._live, -1))[list(order)].flatten(0, 1)
            for name, rows in self._expected.items()
        }
        bug, what = Bug.ROWS_DEPEND_ON_THEIR_PLACE, f"the requests in the order {list(order)}"
        yield from self._try(bug, what, self._requests.take(order).batch(), expected=expected)

    def _try(
        self,
        bug: Bug,
        what: str,
        batch: Any,
        *,
        before: tuple[Any, int] | None = None,
        expected: Tensors | None = None,
        prepare: Callable[[], object] = lambda: None,
        watch: bool = True,
    ) -> Iterator[Case]:
        """Replay a batch, and compare: to the bit, unless another output is expected."""
        trials, live = self._trials, self._live
        if before is not None:
            trials.leave(*before)
        got = trials.run(batch, self._size, live, prepare)
        write = trials.state.stray_write(batch) if watch else None
        if write is not None:
            self._writes.append(Case(Bug.WRITE_OUTSIDE_LIVE_SLOTS, what, live, write))
        allowed = 0.0 if expected is None else tolerance(expected)
        expected = self._expected if expected is None else expected
        found = first_difference(expected, got, allowed, lambda row, rows: row * live // rows)
        if found is not None:
            then = self._then(batch, expected, got) if found.field == "next_token_logits" else ""
            yield Case(bug, what, live, found, then)

    def _then(self, batch: Any, expected: Tensors, got: Tensors) -> str:
        """What other logits lead to in a verify."""
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
        return (
            f" Request {request} then accepts {int(other[request])} drafts instead of "
            f"{int(one[request])}."
        )


def _listed(lives: Sequence[int]) -> str:
    whole = list(lives) == list(range(1, len(lives) + 1)) and len(lives) > 2
    return f"1 to {lives[-1]}" if whole else ", ".join(map(str, lives))
