"""Capture a runner's graphs again and again, next to the runner's own, to compare the captures.

torch's kernels take structs by value and leave some of their bytes unset, so these hold what was on
the host's stack. Three measures separate them from bytes that are set. The stack is filled before
each operation, with zeros or with ``UNSET_MARKER``. A first capture stays open, so that all others
get the same memory from the allocator. Where equal captures differ nevertheless, both are replayed:
bytes that change no result have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from graphkit.audit.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.audit.capture_differences import (
    CaptureDifference,
    UnsetBytes,
    capture_differences,
    differing_bytes,
    filled_bytes,
)
from graphkit.audit.object_snapshot import checksum
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.row_axes import rows_of_batch, without_reserved_rows
from graphkit.audit.runs import EqualStateRuns
from graphkit.graphs import UNSET_MARKER, Attribution, CapturedGraph, StateSnapshot, gc_paused
from graphkit.graphs.walk.inspect import inspect_graph
from graphkit.records import Node
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

CanonicalBySize = Mapping[int, Sequence[CanonicalNode]]
"""Canonical nodes of each captured size."""
GraphsBySize = Mapping[int, CapturedGraph]
ReplayComparison = Literal["different", "nondeterministic", "equal"]
"""``nondeterministic`` if two replays of one graph differ, so that nothing can be compared."""
DrawBatch = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A capture of each size without a change.

    Attributes:
        nodes: Canonical nodes of each size.
        records: The same nodes as records, to name them in findings.
        unset: Bytes that torch leaves unset.
    """

    nodes: CanonicalBySize
    records: Mapping[int, Sequence[Node]]
    unset: Mapping[int, UnsetBytes]

    def differences(
        self, before: CanonicalBySize, after: CanonicalBySize
    ) -> dict[int, list[CaptureDifference]]:
        """Return the differences of each size, without unset bytes."""
        return {
            size: list(capture_differences(nodes, after[size], self.unset[size]))
            for size, nodes in before.items()
        }


class Recaptures:
    """Captures a runner's graphs next to the runner's own, and reads them.

    Args:
        target: Draws the batches that captures run on.
        runner: A runner of the target. Nothing may be replayed during captures.

    Attributes:
        is_cuda: Whether the runner is on a CUDA device.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self._target, self._runner = target, runner
        self.is_cuda = runner.device.type == "cuda"
        self._state = target.mutable_state or {}
        self._names = runner.memory_names(target.weights)
        self._kept: GraphsBySize = {}

    def batches(self, seed: int, live: int | None = None) -> DrawBatch:
        """Return a function that draws the batch of a size, of at most ``live`` requests."""
        return lambda size: self._target.batch(self._runner.mode, min(live or size, size), seed)

    @contextmanager
    def first_kept(self) -> Iterator[None]:
        """Keep a first capture open during the block."""
        paused = gc_paused() if self.is_cuda else nullcontext()  # a recorder needs no pause
        with paused, self.captured(self.batches(seed=1)) as self._kept:
            yield
        self._kept = {}

    @contextmanager
    def captured(self, draw: DrawBatch, stack_fill: int = 0) -> Iterator[GraphsBySize]:
        """Capture every size for the block.

        Args:
            draw: Returns the batch of a size that captures run on.
            stack_fill: Content of the bytes that kernels leave unset, see ``Attribution``.
        """
        attribution = Attribution(self._target.weights, stack_fill=stack_fill)
        with self._runner.recapture(draw, attribution=attribution) as graphs:
            yield graphs

    def canonical_nodes(self, draw: DrawBatch, stack_fill: int = 0) -> CanonicalBySize:
        """Capture every size, and return the canonical nodes; arguments as for ``captured``."""
        with self.captured(draw, stack_fill) as graphs:
            return self._canonical(graphs)

    def baseline(self) -> tuple[Baseline, CanonicalBySize]:
        """Capture twice without a change; returns the first as baseline, and the second."""
        draw = self.batches(seed=1)
        with self.captured(draw) as graphs:
            first = self._canonical(graphs)
            records = {
                size: inspect_graph(graph, names=self._names).nodes
                for size, graph in graphs.items()
            }
        with self.captured(draw) as graphs:
            second = self._canonical(graphs)
            differ = self.on_any_rank(first != second) and (
                self.compare_replays(graphs) == "different"
            )
        marked = self.canonical_nodes(draw, UNSET_MARKER)
        unset = {
            size: filled_bytes(nodes, marked[size])
            if differ
            else differing_bytes(nodes, second[size], marked[size])
            for size, nodes in first.items()
        }
        return Baseline(first, records, unset), second

    def on_any_rank(self, is_needed: bool) -> bool:
        """Return whether any rank needs a further capture or replay, which all then run."""
        return on_any_rank(self._runner, is_needed)

    def compare_replays(self, graphs: GraphsBySize) -> ReplayComparison:
        """Compare outputs and state after replays with those of the first capture, bit by bit."""
        runner = self._runner
        with StateSnapshot(self._state, runner.device) as start:
            results = {self._compare_size(size, graph, start) for size, graph in graphs.items()}
        unequal: tuple[ReplayComparison, ...] = ("different", "nondeterministic")
        return next((result for result in unequal if result in results), "equal")

    def _canonical(self, graphs: GraphsBySize) -> CanonicalBySize:
        return {size: canonical_nodes(graphs[size], self._names) for size in sorted(graphs)}

    def _compare_size(
        self, size: int, graph: CapturedGraph, start: StateSnapshot
    ) -> ReplayComparison:
        batch, page_size = self.batches(seed=1)(size), self._runner.sizes.page_size
        runs = EqualStateRuns(self._runner, batch, size, start)
        rows = rows_of_batch(batch, page_size)

        def checksums(graph: CapturedGraph) -> list[int]:
            output = runs.replay(graph).values()
            state = (
                without_reserved_rows(tensor, page_size, rows) for tensor in self._state.values()
            )
            return [checksum(tensor) for tensor in (*output, *state)]

        kept, other = (
            [checksums(captured) for _ in range(2)] for captured in (self._kept[size], graph)
        )
        if kept[0] != kept[1] or other[0] != other[1]:
            return "nondeterministic"
        return "equal" if kept[0] == other[0] else "different"
