"""Replay of recorded graphs operation by operation, to find the first different result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphkit.audit.object_snapshot import checksum
from graphkit.graphs.operations import arguments_written
from graphkit.graphs.pool_memory import UNINITIALISED
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.recorded_op import RecordedOp, replay_context


def first_result_difference(graph: Any, new: Any, replay: Callable[[Any], object]) -> int | None:
    """Return the index of the first operation whose results differ between two graphs.

    Ignores results that differ between two replays of the first graph, too: those of the refresh,
    which counts replays, and those of memory that is not initialised.

    Args:
        graph: A ``RecordedGraph``, or a sequence of them.
        new: Another one, of the same operations.
        replay: Replays a graph, each time from the same state.
    """
    replays = [_CheckedReplay(each) for each in (graph, graph, new)]
    for each in replays:
        replay(each)
    results = zip(*(each.checksums for each in replays), strict=False)
    return next((i for i, (one, again, other) in enumerate(results) if one == again != other), None)


class _CheckedReplay:
    """A captured graph that keeps the checksums of each operation's results."""

    def __init__(self, graph: Any) -> None:
        graphs: Sequence[RecordedGraph] = getattr(graph, "graphs", (graph,))
        self.output = graph.output
        self.checksums: list[list[int]] = []
        self._ops = [op for each in graphs for op in each.ops]

    def replay(self) -> None:
        """Run every operation; see ``RecordedGraph.replay``."""
        with replay_context():
            for op in self._ops:
                op.run()
                self.checksums.append([checksum(tensor) for tensor in written_tensors(op)])


def written_tensors(op: RecordedOp) -> Iterator[torch.Tensor]:
    """Yield the results of an operation and the arguments that it writes."""
    if op.op.overloadpacket not in UNINITIALISED:
        yield from op.results
    yield from arguments_written(op.op, op.args, op.kwargs)
