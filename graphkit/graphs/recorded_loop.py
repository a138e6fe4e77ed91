"""Loops of the recorder: the same conditions as on the device, read by the host.

Launches run in the order of a CUDA stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from graphkit.errors import ReplayError
from graphkit.graphs.attribution import NodeOrigin
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
        self.prologue, self._bodies, self._again, self._body = prologue, bodies, again, body
        self.output: Any = prologue.output
        self.num_nodes = prologue.num_nodes + sum(graph.num_nodes for graph in bodies)
        self.pool_bytes = self.executable_bytes = 0
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
        """Return nothing: the memory belongs to the bodies."""
        return []

    def wait(self) -> None:
        """Run bodies until the launches end. Discard them if the host was interrupted in one."""
        self._queue.discard_interrupted(self.prologue)
        self._queue.finish()

    def close(self) -> None:
        """Complete the launches, or discard them if that fails. The bodies stay open."""
        try:
            self.wait()
        finally:
            self._queue.remove(self)
            self.output = None

    def begin(self) -> None:
        """Run the prologue."""
        self.prologue.run()

    def run_body(self) -> bool:
        """Run the next body, and return whether another one follows."""
        self._bodies[int(self._body)].run()
        return bool(self._again)


class _Launch:
    """A launch of a loop. The loop may be dropped before it ends.

    Attributes:
        has_begun: Whether the prologue has run.
        is_running: Whether the host runs a part of the loop, or was interrupted in it.
    """

    def __init__(self, loop: RecordedLoop) -> None:
        self.loop, self.has_begun, self.is_running = ref(loop), False, False


class LoopQueue:
    """The launches of a recorder's loops that have not ended, the oldest first.

    The oldest one runs a body whenever the host waits for it, so that results arrive one after the
    other, as from a device. Everything else of the recorder waits for all of them.
    """

    def __init__(self) -> None:
        self._launches: deque[_Launch] = deque()

    def launch(self, loop: RecordedLoop) -> None:
        """Begin a loop, or let it wait for the end of the launches before."""
        launch = _Launch(loop)
        if self._oldest() is None:
            launch.is_running = True
            self._launches.append(launch)
            loop.begin()
            launch.has_begun, launch.is_running = True, False
        else:
            self._launches.append(launch)

    def advance(self) -> None:
        """Run the next body of the oldest launch, if there is one.

        An interrupt does not stop a device, but it stops the host within an operation, which cannot
        be run again.

        Raises:
            ReplayError: An earlier call was interrupted.
        """
        loop = self._oldest()
        if loop is None:
            return
        launch = self._launches[0]
        if launch.is_running:
            raise ReplayError(
                "a step of a device loop was interrupted, for example by a KeyboardInterrupt. The "
                "recorder runs loops on the host and cannot continue this one. Call stop_loops, "
                "release the requests, and admit them again with the text received so far."
            )
        launch.is_running = True
        try:
            if not launch.has_begun:
                loop.begin()
                launch.has_begun = True
            if not loop.run_body():
                self._launches.popleft()
        except Exception:  # all later calls raise it, too, as on a device
            launch.is_running = False
            raise
        launch.is_running = False

    def finish(self) -> None:
        """Run bodies until all launches have ended."""
        while self._launches:
            self.advance()

    def remove(self, loop: RecordedLoop) -> None:
        """Remove the launches of a loop."""
        self._launches = deque(launch for launch in self._launches if launch.loop() is not loop)

    def discard_interrupted(self, prologue: RecordedGraph) -> None:
        """Remove all launches of loops with this prologue if the oldest one was interrupted."""
        loop = self._oldest()
        if loop is not None and loop.prologue is prologue and self._launches[0].is_running:
            self._launches = deque(
                launch
                for launch in self._launches
                if (loop := launch.loop()) is not None and loop.prologue is not prologue
            )

    def _oldest(self) -> RecordedLoop | None:
        """Return the loop of the oldest launch, and forget launches whose loop was dropped."""
        while self._launches:
            loop = self._launches[0].loop()
            if loop is not None:
                return loop
            self._launches.popleft()
        return None
