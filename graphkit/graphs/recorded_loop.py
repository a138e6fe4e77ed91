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
    the other, as from a device. A launch first completes the one before.
    """

    def __init__(
        self,
        prologue: RecordedGraph,
        bodies: Sequence[RecordedGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> None:
        self._prologue, self._bodies, self._again, self._body = prologue, bodies, again, body
        self._is_running = False
        self.output: Any = prologue.output
        self.num_nodes = prologue.num_nodes + sum(each.num_nodes for each in bodies)
        self.pool_bytes = 0
        self.origins: tuple[NodeOrigin, ...] = ()
        self.allocations: tuple[Allocation, ...] = ()

    def replay(self) -> None:
        """Complete the launch before, then run the prologue."""
        self.wait()
        self._prologue.replay()
        self._is_running = True

    def poll(self) -> None:
        """Run the next body, if the launch has not ended."""
        if self._is_running:
            self._bodies[int(self._body)].replay()
            self._is_running = bool(self._again)

    def join(self) -> None:
        """Complete the launch: work of the CPU runs at once."""
        self.wait()

    def pool_memory(self) -> list[PoolBlock]:
        """Return nothing: the memory is that of the bodies."""
        return []

    def wait(self) -> None:
        """Run bodies until the launch ends."""
        while self._is_running:
            self.poll()

    def close(self) -> None:
        """Complete the launch. The bodies stay open."""
        self.wait()
        self.output = None
