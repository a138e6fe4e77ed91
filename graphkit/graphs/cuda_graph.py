"""CUDA graphs, and the memory pool that they share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphkit.errors import ReplayError
from graphkit.graphs.attribution import Attribution, NodeOrigin
from graphkit.graphs.driver import (
    count_nodes,
    launch_function,
    runtime_executable,
    runtime_stream,
)
from graphkit.graphs.pool_memory import Allocation, PoolBlock, blocks_of_segments, memory_segments


class CudaPool:
    """The memory of several graphs, and the order of their replays.

    A replay writes memory that other graphs of the pool use, so it waits for the replay before.

    Attributes:
        device, device_index: The device and its index.
        id: Of the memory pool, from ``torch.cuda.graph_pool_handle``.
        graphs: The graphs that are not closed. Weak references: a runner that is dropped without
            ``close`` frees its graphs.
        last_handle: Handle of the stream of the last replay; -1 before the first one.
        last_stream: The same stream as a launch takes it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_index = device, device.index
        self.id = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        # What torch.cuda.current_device and current_stream call, without their checks (2.11, 2.13).
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.last_handle = -1
        self.last_stream: Any = None
        self._last: torch.cuda.Stream | None = None

    def launch(self, start: Callable[[Any], None]) -> None:
        """Call ``start`` with the current stream of the device, after replays on other streams."""
        if self.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):  # each device has its current stream
                return self.launch(start)
        if self.current_handle(self.device_index) != self.last_handle:
            self.wait_for_replays()
        start(self.last_stream)
        return None

    def wait_for_replays(self) -> None:
        """Make the current stream wait for the stream of the last replay, if they differ."""
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last, self.last_handle = current, current.cuda_stream
        self.last_stream = runtime_stream(current)

    def begin_session(self) -> None:
        """Create the pool anew if it has no graph: CUDA freed it with its last one."""
        if not self.graphs:
            self.id = torch.cuda.graph_pool_handle()

    def end_session(self) -> None:
        """Set the current stream as the stream of the replays, all of which have ended."""
        self._last = None
        self.wait_for_replays()

    def num_bytes(self) -> int:
        """Return the bytes of all segments of the pool."""
        return sum(segment["total_size"] for segment in self.segments())

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments of the pool, as in ``torch.cuda.memory_snapshot``."""
        return [
            segment
            # All blocks of a large model take longer to list than a size takes to capture.
            for segment in memory_segments(self.id)
            if tuple(segment["segment_pool_id"]) == tuple(self.id)
        ]


class CudaGraph:
    """A captured, instantiated and uploaded CUDA graph. Implements ``CapturedGraph``.

    ``output`` does not own its memory: captures of smaller sizes reuse it, so it is valid from a
    replay of this graph until the next replay of any graph of the pool.

    Attributes:
        graph: The ``torch.cuda.CUDAGraph``, which keeps its template (``keep_graph=True``).
        device: Its device.
    """

    def __init__(
        self,
        pool: CudaPool,
        graph: torch.cuda.CUDAGraph,
        output: Any,
        pool_bytes: int,
        attribution: Attribution | None,
    ) -> None:
        self.graph, self.device = graph, pool.device
        self.origins: tuple[NodeOrigin, ...] = tuple(attribution.origins) if attribution else ()
        self.allocations: tuple[Allocation, ...] = (
            tuple(attribution.allocations) if attribution else ()
        )
        self.output = output
        self.num_nodes = count_nodes(graph)
        self.pool_bytes, self.executable_bytes = pool_bytes, 0
        self._pool, self._close_lock = pool, threading.Lock()
        executable = runtime_executable(graph)
        self._launch: Callable[[Any], None] = lambda _stream: graph.replay()
        # Only CUDAGraph.replay advances the random generator; other graphs skip its overhead.
        if not self._draws_random_numbers() and executable is not None:
            self._launch = launch_function(executable)

    def replay(self) -> None:
        """Launch on the current stream, after replays of this pool on other streams.

        One ``cudaGraphLaunch`` and no other CUDA call, unless the stream changed since the last
        replay or the graph draws random numbers.
        """
        self._pool.launch(self._launch)

    def pool_memory(self) -> list[PoolBlock]:
        """Return the blocks of the pool, also those that its other graphs use."""
        return blocks_of_segments(self._pool.segments(), self._pool.device)

    def close(self) -> None:
        """Destroy the graph and free its share of the pool. Any thread may call this method."""
        self.output, self._launch = None, _refuse_launch
        # Each thread has a current device, on which CUDA creates a context if it has none.
        with self._close_lock, torch.cuda.device(self._pool.device):
            self.graph.reset()
        self._pool.graphs.discard(self)

    def _draws_random_numbers(self) -> bool:
        """Replay once, which also pays the cost of the first launch, and check the generator."""
        generator = torch.cuda.default_generators[self._pool.device_index]
        before = generator.get_offset()
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return bool(generator.get_offset() != before)


def _refuse_launch(_stream: Any) -> None:
    raise ReplayError("the graph is closed. Capture again.")
