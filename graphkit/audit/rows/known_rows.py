"""Rows that several runs compute, compared bit for bit, and the first node that differs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from graphkit.audit.bits import same_bits
from graphkit.audit.runs.first_node import FirstNode, first_node_in
from graphkit.audit.runs.forward_trace import ForwardTrace, Weights, traced
from graphkit.audit.runs.live_rows import LiveRows, Pair, RowPlaces, matched_rows
from graphkit.runners import Output
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import Tensors
from graphkit.runners.step import Step


@dataclass(frozen=True, slots=True)
class RowRun:
    """A run of a step on one batch, without a graph.

    Attributes:
        text: What the batch is, as a phrase that follows a number, such as ``among 4 requests``.
        step: The step that runs.
        keys: What identifies the rows of each unit of the batch: of a request, or of one token.
        names: Name of each unit, such as ``request 2``.
        counts: Token rows of each unit.
        prepare: Restores the state in which the run begins.
        run: Runs the step.
    """

    text: str
    step: Step[Any]
    keys: Sequence[Hashable]
    names: Sequence[str]
    counts: Sequence[int]
    prepare: Callable[[], object]
    run: Callable[[], Output]

    def tokens(self, unit: int) -> range:
        """Return the token rows of a unit."""
        end = list(accumulate(self.counts))[unit]
        return range(end - self.counts[unit], end)

    def rows(self, output: Tensors, unit: int) -> dict[str, torch.Tensor]:
        """Return the rows of a unit in every field of an output."""
        return {name: rows[self._part(len(rows), unit)] for name, rows in output.items()}

    def trace(self, call: int, weights: Weights) -> ForwardTrace:
        """Run the step, and return the trace of a call of its forward."""
        self.prepare()
        with traced(self.step, call, weights) as trace:
            self.run()
        return trace

    def _part(self, num_rows: int, unit: int) -> slice:
        if num_rows == sum(self.counts):
            tokens = self.tokens(unit)
            return slice(tokens.start, tokens.stop)
        width = num_rows // len(self.keys)
        return slice(unit * width, (unit + 1) * width)


@dataclass(frozen=True, slots=True, eq=False)
class RowDifference:
    """A unit whose bits two runs compute differently.

    Attributes:
        expected, got: The run that was first, and the other one.
        units: Index of the unit in either run.
        field: Output field.
        rows: The rows of the unit in that field, in either run.
    """

    expected: RowRun
    got: RowRun
    units: tuple[int, int]
    field: str
    rows: tuple[torch.Tensor, torch.Tensor]

    def first_node(self, rounding: Rounding, weights: Weights) -> FirstNode | None:
        """Return the first node that computes other bits.

        Integers, such as the index of a row in its batch, are compared only if no other number
        explains the difference.
        """

        def traces(call: int) -> tuple[ForwardTrace, ForwardTrace]:
            return self.expected.trace(call, weights), self.got.trace(call, weights)

        rows = matched_rows(*self._places())
        found = (first_node_in(traces, read, rounding, [0.0]) for read in (_floats(rows), rows))
        return next((node for node in found if node is not None), None)

    def _places(self) -> Iterator[RowPlaces]:
        one, other = self.expected, self.got
        first, second = self.units
        yield RowPlaces([first], [second], len(one.keys), len(other.keys))
        totals = sum(one.counts), sum(other.counts)
        tokens = one.tokens(first), other.tokens(second)
        yield RowPlaces(*tokens, *totals, may_have_pads=True)


class KnownRows:
    """The rows of all runs so far.

    Attributes:
        num_compared: Units that were compared with those of an earlier run.
    """

    def __init__(self) -> None:
        self.num_compared = 0
        self._rows: dict[Hashable, tuple[RowRun, int, Tensors]] = {}

    def difference(self, run: RowRun, output: Output) -> RowDifference | None:
        """Compare the output of a run with earlier ones, and keep what is new.

        Returns:
            The first unit with other bits; ``None`` if there is none.
        """
        tensors = output.tensors()
        for unit, key in enumerate(run.keys):
            rows = {name: tensor.clone() for name, tensor in run.rows(tensors, unit).items()}
            expected, first, known = self._rows.setdefault(key, (run, unit, rows))
            if known is rows:
                continue
            self.num_compared += 1
            for name in known:
                if name in rows and not same_bits(known[name], rows[name]):
                    return RowDifference(
                        expected, run, (first, unit), name, (known[name], rows[name])
                    )
        return None


def _floats(rows: LiveRows) -> LiveRows:
    """Return a function that pairs as another one, and lets integers agree."""

    def pair(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
        if expected.is_floating_point():
            yield from rows(expected, got)
        else:
            yield expected, expected

    return pair
