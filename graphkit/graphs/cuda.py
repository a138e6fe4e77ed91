"""The CUDA backend: one memory pool, one capture stream, graphs whose template is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graphkit.errors import DeviceError
from graphkit.graphs.driver import count_nodes, upload
from graphkit.graphs.failures import CaptureFailure, failure_of
from graphkit.graphs.refusing import RefusingMode
from graphkit.graphs.weak import weak_references


class CudaGraph:
    """A captured CUDA graph, uploaded. See ``CapturedGraph``.

    ``output`` does not keep its memory from being reused by later captures of the pool: it is
    valid from a replay of this graph until the next replay of any graph of the pool.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any, pool_bytes: int) -> None:
        self.graph = graph
        self.output = output
        self.num_nodes = count_nodes(graph)
        self.pool_bytes = pool_bytes
        self.replay: Callable[[], None] = graph.replay

    def close(self) -> None:
        """Destroy the graph; its share of the pool becomes free."""
        self.output = None
        self.replay = _refuse_closed
        self.graph.reset()


class CudaBackend:
    """Captures on a CUDA device. See ``Backend``.

    All runners that share one instance share its pool, so their replays must not overlap;
    ``order`` sees to that across streams.

    Raises:
        DeviceError: torch sees no CUDA device.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device: torch sees none. Use device='cpu' for the recorder.")
        wanted = torch.device(device)
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        self.device = torch.device("cuda", index)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        self._last: torch.cuda.Stream | None = None
        self._last_handle = -1

    @contextmanager
    def session(self) -> Iterator[None]:
        """Work on the capture stream with the collector off; then put everything back.

        The collector could otherwise free device memory in the middle of a capture.
        """
        random_state = torch.cuda.get_rng_state(self.device)
        collects = gc.isenabled()
        gc.collect()
        gc.disable()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.synchronize(self.device)
            torch.cuda.set_rng_state(random_state, self.device)
            # Blocks of the warm-ups belong to the capture stream; nobody else could use them.
            torch.cuda.empty_cache()
            if collects:
                gc.enable()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on the capture stream and wait for it."""
        try:
            function()
            self.stream.synchronize()
        except Exception as error:
            raise failure_of(error) from error

    def capture(self, function: Callable[[], Any]) -> CudaGraph:
        """Capture the function, instantiate the graph and upload it."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = self.pool_bytes()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            output = function()
            graph.capture_end()
        except BaseException as error:
            self._abandon(graph)
            if isinstance(error, Exception):
                raise failure_of(error) from error
            raise
        graph.instantiate()
        upload(graph, self.stream)
        return CudaGraph(graph, weak_references(output), self.pool_bytes() - before)

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run the function without a graph until it reaches what a capture refuses."""
        try:
            with RefusingMode():
                function()
        except CaptureFailure as failure:
            return failure
        except Exception as error:
            return failure_of(error)
        finally:
            torch.cuda.synchronize(self.device)
        return None

    def order(self) -> None:
        """Make the current stream wait for the stream of the last replay, if that was another."""
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle != self._last_handle:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_handle = current, handle

    def is_alive(self) -> None:
        """Raise what the device reports, such as an illegal address."""
        torch.cuda.current_stream(self.device).query()

    def pool_bytes(self) -> int:
        """Bytes of all segments of the pool."""
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self.pool)
        )

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. An invalidated one refuses to end, and is ended by that."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        graph.reset()


def _refuse_closed() -> None:
    raise AssertionError("a closed graph was replayed")
