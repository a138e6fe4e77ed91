"""Running recorded graphs operation by operation, to find the first that makes something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphkit.audit.object_snapshot import checksum
from graphkit.audit.rerun import Rerun
from graphkit.graphs.recorder import RecordedGraph, RecordedOp, replay_context
from graphkit.graphs.walk.recorder_walk import tensors_in

_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose results hold anything."""


def first_other_result(graph: Any, now: Any, rerun: Rerun) -> int | None:
    """Index of the first operation of which two graphs make something else.

    What differs between two replays of the first graph as well is passed over: the refresh, which
    counts replays, and results that hold what was there before.

    Args:
        graph: A ``RecordedGraph``, or a chain of them.
        now: Another one.
        rerun: Replays them from the same moment.
    """
    steps = [_Stepwise(each) for each in (graph, graph, now)]
    for each in steps:
        rerun(each)
    made = zip(*(each.made for each in steps), strict=False)
    return next((i for i, (one, again, other) in enumerate(made) if one == again != other), None)


class _Stepwise:
    """Replays like a graph, and looks at what each operation makes."""

    def __init__(self, graph: Any) -> None:
        parts: Sequence[RecordedGraph] = getattr(graph, "graphs", (graph,))
        self.output = graph.output
        self.made: list[list[int]] = []
        self._ops = [op for part in parts for op in part.ops]

    def replay(self) -> None:
        """See ``RecordedGraph.replay``."""
        with replay_context():
            for op in self._ops:
                op.run()
                self.made.append([checksum(tensor) for tensor in written(op)])


def written(op: RecordedOp) -> Iterator[torch.Tensor]:
    """What an operation makes, and what it writes in place."""
    if op.op.overloadpacket.__name__ not in _UNSET:
        yield from op.results
    declared = op.op._schema.arguments
    given = {**dict(zip((each.name for each in declared), op.args, strict=False)), **op.kwargs}
    for each in declared:
        if each.alias_info is not None and each.alias_info.is_write:
            yield from tensors_in(given.get(each.name))
