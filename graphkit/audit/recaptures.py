"""Capture a runner's graphs again and again, next to the runner's own, and compare the captures.

torch's kernels take structs by value and leave some of their bytes unset, so these hold what was on
the host's stack. Four measures separate them from bytes that are set. The stack is filled before
each operation, with zeros or with ``UNSET_MARKER``. A first capture stays open, so that all others
get the same memory from the allocator. A difference counts only if it shows again with the two
captures in the other order, and with another fill of the stack. Where that leaves a doubt, both
captures are replayed: bytes that change no result have no meaning.

The recorder has no such bytes. There a change takes one capture, and a difference two more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from graphkit.audit.bits import checksum
from graphkit.audit.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.audit.capture_differences import (
    CaptureDifference,
    UnsetBytes,
    capture_differences,
    differing_bytes,
    filled_bytes,
)
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.replayable_graph import is_optional_pointer
from graphkit.audit.row_axes import rows_of_batch, without_reserved_rows
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.graphs import (
    UNSET_MARKER,
    Attribution,
    Backend,
    CapturedGraph,
    StateSnapshot,
    gc_paused,
)
from graphkit.graphs.walk.inspect import inspect_graph
from graphkit.records import Node
from graphkit.runners import Runner

CanonicalBySize = Mapping[int, Sequence[CanonicalNode]]
"""Canonical nodes of each captured size."""
DifferencesBySize = Mapping[int, Sequence[CaptureDifference]]
GraphsBySize = Mapping[int, CapturedGraph]
ReplayComparison = Literal["different", "nondeterministic", "equal"]
"""``nondeterministic`` if two replays of one graph differ, so that nothing can be compared."""
DrawBatch = Callable[[int], Any]
"""Returns the batch of a size that warm-ups and captures run on."""
_CONFIRMATIONS = ((UNSET_MARKER, False), (0, True), (UNSET_MARKER, True))
"""Fill of the stack, and whether the changed capture comes first, of each repetition."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the host may make between a capture and a replay.

    Attributes:
        applied: Makes the change for a block.
        draw: Draws the batch of each size; ``None`` draws that of the baseline.
    """

    applied: Callable[[], AbstractContextManager[object]] = nullcontext
    draw: DrawBatch | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A capture of each size without a change.

    Attributes:
        nodes: Canonical nodes of each size.
        records: The same nodes as records, to name them in findings.
        unset: Bytes that torch leaves unset.
        repeated: Differences from a second capture; empty if none was made.
    """

    nodes: CanonicalBySize
    records: Mapping[int, Sequence[Node]]
    unset: Mapping[int, UnsetBytes]
    repeated: DifferencesBySize


class Recaptures:
    """Captures a runner's graphs next to the runner's own, and compares them.

    Args:
        runner: The runner. Nothing may be replayed during captures.
        draw: Draws a valid batch of each size for captures and for the comparison of replays.
            ``None`` captures on pads and replays nothing.
        weights: The model, or its weights by name, to name nodes by.
        start: The host as it is in a capture without a change.
        batch_sizes: Sizes to capture; ``None`` selects the runner's.
        backend: Backend that captures; ``None`` selects the runner's.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        draw: DrawBatch | None = None,
        *,
        weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
        start: Change | None = None,
        batch_sizes: Collection[int] | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.runner, self.is_cuda = runner, runner.device.type == "cuda"
        self._draw, self._weights, self._start = draw, weights, start or Change()
        self._settings: dict[str, Any] = {"batch_sizes": batch_sizes, "backend": backend}
        self._names = runner.memory_names(weights)
        self._kept: GraphsBySize = {}

    @contextmanager
    def captured(
        self, change: Change | None = None, attribution: Attribution | None = None
    ) -> Iterator[GraphsBySize]:
        """Capture every size for the block, with a change if there is one."""
        change = change or self._start
        with (
            change.applied(),
            self.runner.recapture(
                make_batch=change.draw or self._draw, attribution=attribution, **self._settings
            ) as graphs,
        ):
            yield graphs

    @contextmanager
    def first_kept(self) -> Iterator[None]:
        """Keep a first capture open during the block. The recorder needs none."""
        if not self.is_cuda:
            yield
            return
        with gc_paused(), self.captured(attribution=Attribution(self._weights)) as self._kept:
            yield
        self._kept = {}

    def nodes(self, change: Change | None = None, stack_fill: int = 0) -> CanonicalBySize:
        """Capture every size, and return the canonical nodes."""
        attribution = Attribution(self._weights, stack_fill=stack_fill)
        with self.captured(change, attribution) as graphs:
            return self._canonical(graphs)

    def baseline(self, *, is_repeated: bool = False) -> Baseline:
        """Capture without a change."""
        with self.captured(attribution=Attribution(self._weights)) as graphs:
            first = self._canonical(graphs)
            records = {
                size: inspect_graph(graph, names=self._names).nodes
                for size, graph in graphs.items()
            }
        second, differ = first, False
        if is_repeated:
            with self.captured(attribution=Attribution(self._weights)) as graphs:
                second = self._canonical(graphs)
                differ = on_any_rank(self.runner, first != second) and (
                    self._compare_replays(graphs) == "different"
                )
        marked = self.nodes(stack_fill=UNSET_MARKER) if self.is_cuda else first
        unset = {
            size: filled_bytes(nodes, marked[size])
            if differ
            else differing_bytes(nodes, second[size], marked[size])
            for size, nodes in first.items()
        }
        return Baseline(first, records, unset, _differences(first, second, unset))

    def differences(self, baseline: Baseline, change: Change) -> DifferencesBySize:
        """Capture with a change, and return what differs from the baseline.

        What differs without the change, too, is left out.

        Raises:
            CaptureError: The step cannot be captured with the change.
        """
        by_size = _differences(baseline.nodes, self.nodes(change), baseline.unset)
        return _without(by_size, baseline.repeated)

    def confirmed(
        self, baseline: Baseline, change: Change, by_size: DifferencesBySize
    ) -> DifferencesBySize:
        """Return those of the differences that a change causes."""
        for stack_fill, changed_first in _CONFIRMATIONS if self.is_cuda else ((0, True),):
            if on_any_rank(self.runner, any(by_size.values())):
                captures = {
                    is_changed: self.nodes(change if is_changed else None, stack_fill)
                    for is_changed in (changed_first, not changed_first)
                }
                again = _differences(captures[False], captures[True], baseline.unset)
                by_size = {
                    size: [d for d in differences if d.is_repeated_in(again[size])]
                    for size, differences in by_size.items()
                }
        certain = {
            size: [d for d in differences if not _is_optional(d, baseline.records[size])]
            for size, differences in by_size.items()
        }
        if not on_any_rank(self.runner, certain != by_size):
            return by_size
        if self._draw is None:  # without a valid batch, nothing can be replayed
            return certain
        with self.captured(change, Attribution(self._weights)) as graphs:
            return certain if self._compare_replays(graphs) == "equal" else by_size

    def _canonical(self, graphs: GraphsBySize) -> CanonicalBySize:
        return {size: canonical_nodes(graphs[size], self._names) for size in sorted(graphs)}

    def _compare_replays(self, graphs: GraphsBySize) -> ReplayComparison:
        """Compare outputs and state after replays with those of the first capture, bit by bit."""
        if not self._kept or self._draw is None:
            return "nondeterministic"
        state = self.runner.mutable_state
        with StateSnapshot(state, self.runner.device) as start:
            results = {
                self._compare_size(size, graph, self._draw(size), start)
                for size, graph in graphs.items()
            }
        unequal: tuple[ReplayComparison, ...] = ("different", "nondeterministic")
        return next((result for result in unequal if result in results), "equal")

    def _compare_size(
        self, size: int, graph: CapturedGraph, batch: Any, start: StateSnapshot
    ) -> ReplayComparison:
        runner, page_size = self.runner, self.runner.sizes.page_size
        runs = EqualStateRuns(runner, batch, size, start)
        rows = rows_of_batch(batch, page_size)

        def checksums(graph: CapturedGraph) -> list[int]:
            output = runs.replay(graph).values()
            state = (
                without_reserved_rows(tensor, page_size, rows)
                for tensor in runner.mutable_state.values()
            )
            return [checksum(tensor) for tensor in (*output, *state)]

        kept, other = (
            [checksums(captured) for _ in range(2)] for captured in (self._kept[size], graph)
        )
        if kept[0] != kept[1] or other[0] != other[1]:
            return "nondeterministic"
        return "equal" if kept[0] == other[0] else "different"


def _differences(
    before: CanonicalBySize, after: CanonicalBySize, unset: Mapping[int, UnsetBytes]
) -> DifferencesBySize:
    """Return the differences of each size, without unset bytes."""
    return {
        size: list(capture_differences(nodes, after[size], unset[size]))
        for size, nodes in before.items()
    }


def _without(by_size: DifferencesBySize, unchanged: DifferencesBySize) -> DifferencesBySize:
    """Return the differences that captures without a change do not show."""
    return {
        size: [d for d in differences if not d.is_repeated_in(unchanged[size])]
        for size, differences in by_size.items()
    }


def _is_optional(difference: CaptureDifference, nodes: Sequence[Node]) -> bool:
    """Return whether the bytes that differ may be leftovers of the stack."""
    if difference.argument is None or difference.offset is None:
        return False
    node = nodes[difference.node]
    return is_optional_pointer(node, node.arguments[difference.argument], difference.offset)
