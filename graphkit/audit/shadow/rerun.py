"""Replaying one batch over and over, always from the same moment, with whatever graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphkit.audit.shadow.ways import Moment
from graphkit.graphs import SizeTable
from graphkit.runners import Runner
from graphkit.runners.replayer import Replayer


class Rerun:
    """Replays a batch at one size of a runner, which counts nothing of it.

    Args:
        runner: Captured; nothing else may be replayed meanwhile.
        batch: A live batch.
        size: A captured size.
        moment: What every replay begins with.
    """

    def __init__(self, runner: Runner[Any], batch: Any, size: int, moment: Moment) -> None:
        self._parts = replace(runner._parts, table=SizeTable(size, [size]))
        self._batch, self._size, self._moment = batch, size, moment

    def __call__(self, graph: Any) -> None:
        """Replay with a graph, or with anything that has ``output`` and ``replay``."""
        self._moment.put_back()
        Replayer(self._parts, {self._size: graph}).replay(self._batch, self._size)
