"""Capturing a runner's graphs aside, over and over, to compare what they were given.

torch's kernels take structs by value and leave bytes of them unset: there stands what the host's
stack held. Those are told from what a capture means by three things. The stack is filled before
each operation, with zeros and with something else. A first capture is kept, so that later ones find
the same memory and take the same way through the allocator. And where two captures of the same
differ all the same, they are replayed: what no result shows meant nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from graphkit.audit.moment import Moment
from graphkit.audit.object_snapshot import checksum
from graphkit.audit.rerun import Rerun
from graphkit.audit.row_axes import RowsByKind, rows_of_batch, without_reserved_rows
from graphkit.graphs import UNSET_MARKER, Attribution, CapturedGraph, gc_paused
from graphkit.graphs.walk.canonical_nodes import CanonicalNode, canonical_nodes
from graphkit.graphs.walk.capture_differences import (
    CaptureDifference,
    UnsetBytes,
    capture_differences,
    differing_bytes,
    filled_bytes,
)
from graphkit.graphs.walk.inspect import inspect_graph
from graphkit.records import Node
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

Images = Mapping[int, Sequence[CanonicalNode]]
"""The image of each captured size."""
Graphs = Mapping[int, CapturedGraph]
Verdict = Literal["different", "restless", "alike"]
"""``restless`` if not even two replays of the same graph are alike, so that nothing is known."""
_VERDICTS: tuple[Verdict, ...] = ("different", "restless")
BatchOf = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What graphs look like when nothing was changed.

    Attributes:
        images: Of each size.
        nodes: The same as nodes, to tell where a difference is.
        unset: Bytes that mean nothing.
    """

    images: Images
    nodes: Mapping[int, Sequence[Node]]
    unset: Mapping[int, UnsetBytes]

    def differences(self, before: Images, after: Images) -> dict[int, list[CaptureDifference]]:
        """Where graphs differ in bytes that mean something."""
        return {
            size: list(capture_differences(image, after[size], self.unset[size]))
            for size, image in before.items()
        }


class Recaptures:
    """Captures a runner's graphs aside, and reads them.

    Args:
        target: Makes the batches that captures see.
        runner: One of the target's; nothing may be replayed meanwhile.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any]) -> None:
        self._target, self._runner = target, runner
        self._state = target.mutable_state or {}
        self._names = runner.memory_names(target.weights)
        self._kept: Graphs = {}

    def batch_of(self, seed: int, live: int | None = None) -> BatchOf:
        """Makes the batch of each size, with so many live requests if that is given."""
        return lambda size: self._target.batch(self._runner.mode, min(live or size, size), seed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a first capture for a block."""
        with gc_paused(), self.captured(self.batch_of(seed=1)) as self._kept:
            yield
        self._kept = {}

    def images(self, batch_of: BatchOf, unset: int = 0) -> Images:
        """Capture every size with these batches in the inputs.

        Args:
            batch_of: Makes the batch of each size.
            unset: What the unset bytes of arguments hold, see ``Attribution``.
        """
        with self.captured(batch_of, unset) as graphs:
            return self._images(graphs)

    def baseline(self) -> tuple[Baseline, Images]:
        """Capture twice with everything equal; returns how the first looks, and the second."""
        plain = self.batch_of(seed=1)
        with self.captured(plain) as graphs:
            first = self._images(graphs)
            nodes = {size: self._nodes(graph) for size, graph in graphs.items()}
        with self.captured(plain) as graphs:
            again = self._images(graphs)
            differ = first != again and self.verdict(graphs) == "different"
        other = self.images(plain, UNSET_MARKER)
        unset = {
            size: filled_bytes(image, other[size])
            if differ
            else differing_bytes(image, again[size], other[size])
            for size, image in first.items()
        }
        return Baseline(first, nodes, unset), again

    @contextmanager
    def captured(self, batch_of: BatchOf, unset: int = 0) -> Iterator[Graphs]:
        """The graphs of every size for a block, captured as for ``images``."""
        attribution = Attribution(self._target.weights, stack_fill=unset)
        with self._runner.captured_aside(batch_of, attribution=attribution) as graphs:
            yield graphs

    def verdict(self, graphs: Graphs) -> Verdict:
        """Whether replays of graphs leave what those of the kept capture leave, to the bit."""
        runner = self._runner
        moment = Moment(self._state, runner.device, runner.sizes.page_size)
        try:
            each = {self._verdict(size, graph, moment) for size, graph in graphs.items()}
        finally:
            moment.put_back()
        return next((one for one in _VERDICTS if one in each), "alike")

    def _images(self, graphs: Graphs) -> Images:
        return {size: canonical_nodes(graphs[size], self._names) for size in sorted(graphs)}

    def _nodes(self, graph: CapturedGraph) -> Sequence[Node]:
        return inspect_graph(graph, names=self._names).nodes

    def _verdict(self, size: int, graph: CapturedGraph, moment: Moment) -> Verdict:
        batch = self.batch_of(seed=1)(size)
        rerun = Rerun(self._runner, batch, size, moment)
        named = rows_of_batch(batch, self._runner.sizes.page_size)
        kept, other = (
            [self._left(rerun, each, named) for _ in range(2)] for each in (self._kept[size], graph)
        )
        if kept[0] != kept[1] or other[0] != other[1]:
            return "restless"
        return "alike" if kept[0] == other[0] else "different"

    def _left(self, rerun: Rerun, graph: CapturedGraph, named: RowsByKind) -> list[int]:
        """What a replay makes and leaves in declared state, without the dummy's rows, as sums."""
        made, page_size = rerun(graph).tensors().values(), self._runner.sizes.page_size
        state = (without_reserved_rows(each, page_size, named) for each in self._state.values())
        return [checksum(tensor) for tensor in (*made, *state)]
