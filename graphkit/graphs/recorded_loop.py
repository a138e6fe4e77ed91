"""Loops of the recorder: the same conditions as on the device, read by the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from graphkit.graphs.attribution import NodeOrigin
    from graphkit.graphs.pool_memory import Allocation, PoolBlock
    from graphkit.graphs.recorder import RecordedGraph


class RecordedLoop:
    """A prologue and bodies that run until a condition ends them. Implements ``LoopGraph``.

    A launch runs the prologue. Each ``poll`` then runs one body, so that results arrive one after
    the other, as from a device. A launch waits for the one before.
    """

    def __init__(
        self,
        prologue: RecordedGraph,
        bodies: Sequence[RecordedGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> None:
        self._prologue, self._bodies, self._again, self._body = prologue, bodies, again, body
        self._is_running, self._num_waiting = False, 0
        self.output: Any = prologue.output
        self.num_nodes = prologue.num_nodes + sum(each.num_nodes for each in bodies)
        self.pool_bytes = 0
        self.origins: tuple[NodeOrigin, ...] = ()
        self.allocations: tuple[Allocation, ...] = ()

    def replay(self) -> None:
        """Run the prologue, or let it wait for the end of the launch before."""
        if self._is_running:
            self._num_waiting += 1
        else:
            self._prologue.replay()
            self._is_running = True

    def poll(self) -> None:
        """Run the next body, if the launches have not ended."""
        if not self._is_running:
            return
        self._bodies[int(self._body)].replay()
        self._is_running = bool(self._again)
        if not self._is_running and self._num_waiting:
            self._num_waiting -= 1
            self.replay()

    def join(self) -> None:
        """Complete the launches: work of the CPU runs at once."""
        self.wait()

    def pool_memory(self) -> list[PoolBlock]:
        """Return nothing: the memory is that of the bodies."""
        return []

    def wait(self) -> None:
        """Run bodies until the launches end."""
        while self._is_running:
            self.poll()

    def close(self) -> None:
        """Complete the launches. The bodies stay open."""
        self.wait()
        self.output = None
