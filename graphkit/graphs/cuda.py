"""The CUDA backend: one memory pool, one capture stream, graphs whose template is kept."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphkit.errors import DeviceError
from graphkit.graphs.attribution import Attribution, Place, noting
from graphkit.graphs.collector import collector_off
from graphkit.graphs.driver import (
    begin_empty_capture,
    capturing_counter,
    count_nodes,
    launcher,
    stream_of,
    upload,
)
from graphkit.graphs.failures import CaptureFailure, failure_of
from graphkit.graphs.refusing import RefusingMode, as_written
from graphkit.graphs.weak import weak_references


class CudaGraph:
    """A captured CUDA graph, uploaded and run once. See ``CapturedGraph``.

    ``output`` does not keep its memory from being reused by later captures of the pool: it is
    valid from a replay of this graph until the next replay of any graph of the pool.
    """

    def __init__(
        self,
        backend: CudaBackend,
        graph: torch.cuda.CUDAGraph,
        output: Any,
        pool_bytes: int,
        places: Sequence[Place] = (),
    ) -> None:
        self.graph = graph
        self.places = tuple(places)
        self.output = output
        self.num_nodes = count_nodes(graph)
        self.pool_bytes = pool_bytes
        self._backend = backend
        draws = self._draws_random_numbers()
        # Only torch's own replay moves the generator on; without one a bare launch is enough.
        self._launch = None if draws else launcher(graph)

    def replay(self) -> None:
        """Launch on the current stream, after replays of this pool on another one."""
        backend = self._backend
        if backend.current_device() != backend.device_index:
            with torch.cuda.device(backend.device_index):  # a default stream is its device's
                return self.replay()
        if backend.current_handle(backend.device_index) != backend.last_handle:
            backend.order()
        if self._launch is None:
            self.graph.replay()
        else:
            self._launch(backend.last_stream)
        return None

    def close(self) -> None:
        """Destroy the graph; its share of the pool becomes free."""
        self.output = self._launch = None
        self.graph.reset()
        self._backend.graphs.discard(self)

    def _draws_random_numbers(self) -> bool:
        """Replay once, which also brings the first launch's costs forward, and look."""
        generator = torch.cuda.default_generators[self._backend.device_index]
        before = generator.get_offset()
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return bool(generator.get_offset() != before)


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
        given: int | None = wanted.index
        index = torch.cuda.current_device() if given is None else given
        self.device, self.device_index = torch.device("cuda", index), index
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        """The graphs that are alive; weak, so that a runner that nobody closed can still die."""
        self.stream = torch.cuda.Stream(self.device)
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.last_handle = -1
        """Handle of the stream of the last replay; ``last_stream`` is it for a launch."""
        self.last_stream: Any = None
        self._last: torch.cuda.Stream | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Work on the capture stream with the collector off; then put everything back."""
        random_state = torch.cuda.get_rng_state(self.device)
        with collector_off():
            torch.cuda.synchronize(self.device)
            if not self.graphs:  # the pool died with its last graph
                self.pool = torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                torch.cuda.synchronize(self.device)
                self._last = None  # nothing is left to wait for
                self.order()  # most replays will come from the stream that captures
                torch.cuda.set_rng_state(random_state, self.device)
                # Blocks of the warm-ups belong to the capture stream; nobody else could use them.
                torch.cuda.empty_cache()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on the capture stream and wait, also for what a failed one began."""
        try:
            try:
                function()
            finally:
                self.stream.synchronize()
        except Exception as error:
            raise failure_of(error) from error

    def capture(
        self, function: Callable[[], Any], attribution: Attribution | None = None
    ) -> CudaGraph:
        """Capture the function, instantiate and upload the graph, and run it once."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = self.pool_bytes()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            with noting(attribution, capturing_counter()):
                output = function()
            graph.capture_end()
        except BaseException as error:
            self._abandon(graph)
            if isinstance(error, Exception):
                raise failure_of(error) from error
            raise
        graph.instantiate()
        upload(graph, self.stream)
        grown = self.pool_bytes() - before
        places = attribution.places if attribution else ()
        captured = CudaGraph(self, graph, weak_references(output), grown, places)
        self.graphs.add(captured)
        return captured

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run the function without a graph until it reaches what a capture refuses."""
        try:
            with as_written(), RefusingMode():  # type: ignore[no-untyped-call]
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
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last, self.last_handle = current, current.cuda_stream
        self.last_stream = stream_of(current)

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
        """End a capture that failed, so that the next one starts clean.

        CUDA refuses to end a capture that a forbidden call invalidated, and torch (2.11) then stops
        halfway: its pool keeps recording and its random generator believes in a capture. Given an
        empty capture on the same stream, torch ends that and puts its own state right.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            begin_empty_capture(self.stream)
            with warnings.catch_warnings(action="ignore"):  # "the graph is empty"
                graph.capture_end()
        graph.reset()
