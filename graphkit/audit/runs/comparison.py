"""Comparison of the replay of one batch with the same step without a graph and without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.forward_watch import ForwardWatch, InputWrite
from graphkit.graphs import NodeOrigin, SizeTable
from graphkit.records import Mismatch
from graphkit.runners import Runner
from graphkit.runners.comparison import GRAPH_DIFFERS, INPUT_WRITTEN, PADDING_LEAKS
from graphkit.runners.comparison.differences import (
    Allowed,
    Tensors,
    even_owner,
    first_not_finite,
    largest_difference,
)

NOT_FINITE = "the output is not finite, with and without the graph"
"""Kind of a mismatch that no comparison shows: NaN or infinity in every run."""
_TRY_ALL_UP_TO = 8
"""Captured sizes up to which every number of live requests is tried."""


def live_sizes(table: SizeTable, size: int) -> list[int]:
    """Return the numbers of live requests to try at a captured size: all, or ends and middle."""
    most = min(size, table.max_batch_size)
    if most <= _TRY_ALL_UP_TO:
        return list(range(1, most + 1))
    smaller = max((other for other in table if other < size), default=0)
    return sorted({1, smaller + 1, most // 2, most - 1, most})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of ``compare_runs``.

    Attributes:
        replayed: Live rows of the replay, by field.
        mismatches: Of the graph, of padding and of inputs that the forward writes, at most one
            each; if there is none, the first row that is not finite.
        largest_difference: Largest difference of floating-point numbers, allowed or not.
    """

    replayed: Tensors
    mismatches: tuple[Mismatch, ...]
    largest_difference: float


def compare_runs(
    runner: Runner[Any, Any],
    batch: Any,
    padded_batch_size: int,
    allowed: Allowed | None = None,
    *,
    tolerance: float = 1.0,
) -> Comparison:
    """Replay a batch, run it padded and unpadded, each time from the same state, and compare.

    The replay comes first, on buffers and graph memory as they are. It must agree with the padded
    run bit for bit, and the padded run with the unpadded one within rounding; see
    ``EqualStateRuns``. Restores state and random numbers.

    Args:
        runner: Captured.
        batch: The mode's inputs, with at least one live request.
        padded_batch_size: The captured size to run at.
        allowed: Largest difference between padded and unpadded numbers, see ``first_difference``;
            ``None`` allows rounding.
        tolerance: Multiple of the usual rounding that is allowed, see ``Rounding``.
    """
    with EqualStateRuns(runner, batch, padded_batch_size, tolerance=tolerance) as runs:
        replayed, watch = runs.replay(), ForwardWatch(runner.step, runner.device, with_ops=False)
        with watch.watching():
            padded = runs.padded()
        written = _input_mismatch(runner, runs, watch.writes)
        padding = runs.padding_difference(allowed)
        graph = runs.graph_difference(padded, replayed)
        if graph is not None:
            graph = runs.judge_graph(padded, replayed).wrong
        finite = None
        if graph is None and padding is None and written is None:
            finite = first_not_finite(replayed, even_owner(batch.batch_size))
    largest = max(runs.largest_difference, largest_difference(padded, replayed))
    found = {
        INPUT_WRITTEN: written, GRAPH_DIFFERS: graph, PADDING_LEAKS: padding, NOT_FINITE: finite
    }  # fmt: skip
    where = runner.mode.name, batch.batch_size, padded_batch_size
    return Comparison(replayed, located(found, *where), largest)


def located(
    found: Mapping[str, Mismatch | None], mode: str, batch_size: int, padded_batch_size: int
) -> tuple[Mismatch, ...]:
    """Return the mismatches that were found, by kind, with the batch that they belong to."""
    where: dict[str, Any] = {"batch_size": batch_size, "padded_batch_size": padded_batch_size}
    return tuple(
        replace(mismatch, kind=kind, mode=mode, **where)
        for kind, mismatch in found.items()
        if mismatch is not None
    )


def _input_mismatch(
    runner: Runner[Any, Any], runs: EqualStateRuns, writes: Sequence[InputWrite]
) -> Mismatch | None:
    """Return the first change of an input field by a forward, with the line that wrote it."""
    write = next(iter(writes), None)
    if write is None or write.change is None:
        return None
    origin = NodeOrigin()
    if runner.group is None:  # ranks may differ in what they found, and run forwards together
        watch = ForwardWatch(runner.step, runner.device)
        with watch.watching():
            runs.padded()
        origins = (other.origin for other in watch.writes if other.field == write.field)
        origin = next(origins, None) or origin
    return replace(write.change, module=origin.module, source=origin.source)
