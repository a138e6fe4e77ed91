"""Replaying one batch over and over, always from the same moment, with whatever graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphkit.audit.moment import Moment
from graphkit.graphs import SizeTable
from graphkit.runners import Output, Runner
from graphkit.runners.replayer import Replayer


class Rerun:
    """Replays a batch at one size of a runner, which counts nothing of it.

    Args:
        runner: One whose buffers the graphs read; nothing else may be replayed meanwhile.
        batch: A live batch.
        size: The graphs'.
        moment: What every replay begins with.
    """

    def __init__(self, runner: Runner[Any], batch: Any, size: int, moment: Moment) -> None:
        self._parts = replace(runner.parts, table=SizeTable(size, [size]))
        self._batch, self._size, self._moment = batch, size, moment

    def __call__(self, graph: Any) -> Output:
        """The live rows of a graph, or of anything that has ``output`` and ``replay``."""
        self._moment.put_back()
        replayer: Replayer[Output] = Replayer(self._parts, {self._size: graph})
        return replayer.replay(self._batch, self._size)
