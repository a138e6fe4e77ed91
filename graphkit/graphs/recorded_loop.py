"""Loops of the recorder: the same conditions as on the device, read by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.loop_queue import LoopQueue
from graphkit.graphs.pool_memory import Allocation, PoolBlock
from graphkit.graphs.recorded_graph import RecordedGraph


class RecordedLoop:
    """A prologue and bodies that run until a condition ends them. Implements ``LoopGraph``.

    A launch runs the prologue once the launches before have ended. Each ``poll`` then runs one
    body. All other work of the recorder runs the remaining bodies first.
    """

    def __init__(
        self,
        queue: LoopQueue,
        prologue: RecordedGraph,
        bodies: Sequence[RecordedGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> None:
        self._queue = queue
        self._prologue, self._bodies, self._again, self._body = prologue, bodies, again, body
        self.output: Any = prologue.output
        self.num_nodes = prologue.num_nodes + sum(each.num_nodes for each in bodies)
        self.pool_bytes = 0
        self.origins: tuple[NodeOrigin, ...] = ()
        self.allocations: tuple[Allocation, ...] = ()

    def replay(self) -> None:
        """Run the prologue, or let it wait for the end of the launches before."""
        self._queue.launch(self)

    def poll(self) -> None:
        """Run the next body of the oldest launch, if the launches have not ended."""
        self._queue.advance()

    def join(self) -> None:
        """Complete the launches: work of the CPU runs at once."""
        self._queue.finish()

    def pool_memory(self) -> list[PoolBlock]:
        """Return nothing: the memory is that of the bodies."""
        return []

    def wait(self) -> None:
        """Run bodies until the launches end."""
        self._queue.finish()

    def close(self) -> None:
        """Complete the launches, or discard them if that fails. The bodies stay open."""
        try:
            self._queue.finish()
        finally:
            self._queue.remove(self)
            self.output = None

    def begin(self) -> None:
        """Run the prologue."""
        self._prologue.run()

    def run_body(self) -> bool:
        """Run the next body, and return whether another one follows."""
        self._bodies[int(self._body)].run()
        return bool(self._again)
