"""First operation of a forward whose live rows differ between two runs, by the memory it reaches.

Both runs execute the same forward, for example without and with pads. Their operations are matched
by name and line. A result that differs counts only if the wrong output follows from it: the largest
length of a batch with pads may differ, and every live row still be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import count, zip_longest
from typing import Any

import torch

from graphkit.audit.runs.forward_trace import ForwardTrace, TracedOp, Weights, traced
from graphkit.audit.runs.live_rows import LiveRows
from graphkit.graphs.attribution import NodeOrigin
from graphkit.runners.comparison.differences import Rounding
from graphkit.runners.step import Step


@dataclass(frozen=True, slots=True)
class FirstNode:
    """The operation at which two runs begin to differ.

    Attributes:
        occurrence: How many operations of that name, module and line the step runs before it.
        outside: Tensors older than the call that either run reads.
        only_in: 0 or 1 if only the first or the second run executes it, else ``None``.
    """

    op: TracedOp
    origin: NodeOrigin
    occurrence: int
    outside: tuple[torch.Tensor, ...] = ()
    only_in: int | None = None

    @property
    def short_name(self) -> str:
        """Name of the operation without namespace and overload, such as ``add``."""
        return self.op.name.partition("::")[2].partition(".")[0]

    @property
    def facts(self) -> dict[str, str]:
        """What ``Check.report`` takes to name the operation, its module and its line."""
        origin = self.origin
        return {"kernel": self.short_name, "module": origin.module, "source": origin.source}

    def text(self, runs: tuple[str, str]) -> str:
        """Return a sentence that names the operation; ``runs`` are the two runs, as phrases."""
        if self.only_in is not None:
            return f" Only {runs[self.only_in]} runs `{self.short_name}`."
        return f" The first node that differs is `{self.short_name}`."


def first_node(
    step: Step[Any],
    runs: tuple[Callable[[], object], Callable[[], object]],
    rows: LiveRows,
    rounding: Rounding,
    weights: Weights = None,
) -> FirstNode | None:
    """Run a step twice for each call of its forward, and return the first node that differs.

    ``runs`` are the run that is right and the other one; each runs the step without a graph.
    Prefers differences beyond rounding to smaller ones.

    Returns:
        The operation from which a different output of the second run follows; ``None`` if nothing
        in the forward explains one.
    """
    for run in reversed(runs):  # what a first call makes and keeps is not part of the comparison
        run()

    def traces(call: int) -> tuple[ForwardTrace, ForwardTrace]:
        # The second run first: it records the results that are forced on the other one.
        with traced(step, call, weights) as got:
            runs[1]()
        with traced(step, call, weights) as expected:
            runs[0]()
        return expected, got

    return first_node_in(traces, rows, rounding, (rounding.most, 0.0))


def first_node_in(
    traces: Callable[[int], tuple[ForwardTrace, ForwardTrace]],
    rows: LiveRows,
    rounding: Rounding,
    limits: Sequence[float],
) -> FirstNode | None:
    """Return the first node that differs in the calls of a forward in two runs.

    Args:
        traces: Returns the traces of a call of the forward in the run that is right and in the
            other one, by its index; without operations behind the last call.
        rows: Reads the live rows of both.
        rounding: Rounding of the step.
        limits: Differences in ulp that count as equal, the preferred one first.

    Returns:
        As for ``first_node``.
    """
    smaller: FirstNode | None = None
    for call in count():
        expected, got = traces(call)
        if not got.ops or not expected.ops:
            return smaller
        for allowed in limits:
            node = _DataFlow(expected, got, rows, rounding, allowed).first(call)
            if node is not None and allowed:
                return node
            smaller = smaller or node
    raise AssertionError("unreachable: a step has a limited number of forwards")


def node_at(trace: ForwardTrace, index: int, call: int) -> FirstNode:
    """Return an operation of a traced call of the forward."""
    keys = [*map(_key, trace.ops, trace.origins)]
    occurrence = call * keys.count(keys[index]) + keys[:index].count(keys[index])
    return FirstNode(trace.ops[index], trace.origins[index], occurrence)


class _DataFlow:
    """Follows differences through the memory of two runs.

    Each storage that holds a different value has the step from which that follows: an operation
    that both runs execute, or one that only one of them does. Storages also have the value that was
    written last, if all of it is known.
    """

    def __init__(
        self,
        expected: ForwardTrace,
        got: ForwardTrace,
        rows: LiveRows,
        rounding: Rounding,
        allowed: float,
    ) -> None:
        self._expected, self._got, self._rows = expected, got, rows
        self._dtype, self._allowed = rounding.dtype, allowed
        self._causes: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._values: tuple[dict[int, torch.Tensor | None], ...] = ({}, {})
        self._steps: list[tuple[int | None, int | None]] = []

    def first(self, call: int) -> FirstNode | None:
        """Return the first operation that the outputs of the second run follow from."""
        for pair in _matched(self._expected, self._got):
            self._steps.append(pair)
            self._follow(*pair)
        reached = [
            cause
            for name, storage in self._got.outputs.items()
            for cause in (
                self._causes[1].get(storage),
                self._causes[0].get(self._expected.outputs.get(name, 0)),
            )
            if cause is not None
        ]
        return self._node(min(reached), call) if reached else None

    def _follow(self, expected: int | None, got: int | None) -> None:
        """Note which memory differs after the operations of one step."""
        step = len(self._steps) - 1
        ops = (
            None if expected is None else self._expected.ops[expected],
            None if got is None else self._got.ops[got],
        )
        is_different = self._is_different(*ops)
        before = self._causes_read(*ops) if is_different is not False else []
        cause = min(before, default=None if is_different is None else step)
        for op, causes, values in zip(ops, self._causes, self._values, strict=True):
            if op is None:
                continue
            for storage, value in zip(op.writes, op.values, strict=True):
                values[storage] = value if op.allocates else None
                if op.allocates:  # a freed storage may have had its address
                    causes.pop(storage, None)
                if is_different is not False and cause is not None:
                    causes[storage] = min(cause, causes.get(storage, cause))

    def _causes_read(self, *ops: TracedOp | None) -> list[int]:
        """Return what the memory that two operations read differs by.

        Where the runs compute equal rows by different operations, nothing differs.
        """
        read = []
        for reads in zip_longest(*(() if op is None else op.reads for op in ops)):
            both = list(zip(reads, self._causes, self._values, strict=True))
            values = [values.get(storage) for storage, _, values in both]
            one, other = values
            if one is None or other is None or not self._agree_in_live_rows(one, other):
                read += [causes[storage] for storage, causes, _ in both if storage in causes]
        return read

    def _is_different(self, expected: TracedOp | None, got: TracedOp | None) -> bool | None:
        """Return whether what two operations wrote differs; ``None`` if it is not known."""
        if expected is None or got is None:
            return True
        if len(expected.values) != len(got.values):
            return True
        pairs = list(zip(expected.values, got.values, strict=True))
        known = [(one, other) for one, other in pairs if one is not None and other is not None]
        if not all(self._agree_in_live_rows(*pair) for pair in known):
            return True
        return False if len(known) == len(pairs) else None

    def _agree_in_live_rows(self, expected: torch.Tensor, got: torch.Tensor) -> bool:
        return any(self._agree(*reading) for reading in self._rows(expected, got))

    def _agree(self, expected: torch.Tensor, got: torch.Tensor) -> bool:
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return False
        a, b = expected, got
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if not a.is_floating_point():
            return torch.equal(a, b)
        a, b = a.double(), b.double()
        difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        eps = max(torch.finfo(dtype).eps for dtype in (self._dtype, got.dtype))
        finite = a.abs().nan_to_num(0.0, posinf=0.0)
        largest = finite.amax() if finite.numel() else finite.sum()
        return not bool((~(difference <= self._allowed * eps * largest)).any())

    def _node(self, step: int, call: int) -> FirstNode:
        expected, got = self._steps[step]
        outside = tuple(
            tensor
            for trace in (self._got, self._expected)
            for op in trace.ops
            for tensor in op.outside
        )
        if got is None:
            assert expected is not None, "a step has an operation"
            return replace(node_at(self._expected, expected, call), outside=outside, only_in=0)
        only_in = 1 if expected is None else None
        return replace(node_at(self._got, got, call), outside=outside, only_in=only_in)


def _matched(expected: ForwardTrace, got: ForwardTrace) -> Iterator[tuple[int | None, int | None]]:
    """Yield the indices of operations of one name and line, and of those that one run lacks."""
    one, other = ([*map(_key, trace.ops, trace.origins)] for trace in (expected, got))
    if one == other:  # the usual case; matching takes quadratic time
        yield from ((i, i) for i in range(len(one)))
        return
    for tag, i, i_end, j, j_end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(range(i, i_end), range(j, j_end), strict=True)
        else:
            yield from ((index, None) for index in range(i, i_end))
            yield from ((None, index) for index in range(j, j_end))


def _key(op: TracedOp, origin: NodeOrigin) -> tuple[str, str, str]:
    return op.name, origin.module, origin.source
