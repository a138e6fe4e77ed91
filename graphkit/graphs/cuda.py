"""The CUDA backend: graphs that share one memory pool and one capture stream.

``streams`` explains why nothing but captures runs on the capture stream.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphkit.errors import DeviceError, ReplayError
from graphkit.graphs.attribution import Attribution, NodeOrigin, attributing
from graphkit.graphs.backend import LoopGraph
from graphkit.graphs.blas_workspaces import allocate_workspaces
from graphkit.graphs.capture_failure import CaptureFailure, failure_of
from graphkit.graphs.capture_rules import CaptureRulesMode
from graphkit.graphs.capture_state import reporting_capture
from graphkit.graphs.cuda_loop import CudaLoop, loop_refusal
from graphkit.graphs.dispatch_modes import compilation_disabled
from graphkit.graphs.driver import (
    begin_empty_capture,
    captured_node_counter,
    count_nodes,
    executable_of,
    launch_function,
    runtime_stream,
    upload,
)
from graphkit.graphs.garbage_collection import gc_paused
from graphkit.graphs.output_aliases import non_owning_aliases
from graphkit.graphs.pool_memory import Allocation, PoolBlock, blocks_of_segments
from graphkit.graphs.streams import note_eager_step


class CudaGraph:
    """A captured, instantiated and uploaded CUDA graph. Implements ``CapturedGraph``.

    ``output`` does not own its memory: captures of smaller sizes reuse it, so it is valid from a
    replay of this graph until the next replay of any graph of the pool.

    Attributes:
        graph: The ``torch.cuda.CUDAGraph``, which keeps its template (``keep_graph=True``).
    """

    def __init__(
        self,
        backend: CudaBackend,
        graph: torch.cuda.CUDAGraph,
        output: Any,
        pool_bytes: int,
        attribution: Attribution | None,
    ) -> None:
        self.graph = graph
        self.origins: tuple[NodeOrigin, ...] = tuple(attribution.origins) if attribution else ()
        self.allocations: tuple[Allocation, ...] = (
            tuple(attribution.allocations) if attribution else ()
        )
        self.output = output
        self.num_nodes = count_nodes(graph)
        self.pool_bytes = pool_bytes
        self._backend = backend
        executable = executable_of(graph)
        self._launch: Callable[[Any], None] = lambda _stream: graph.replay()
        # Only CUDAGraph.replay advances the random generator; other graphs skip its overhead.
        if not self._draws_random_numbers() and executable is not None:
            self._launch = launch_function(executable)

    def replay(self) -> None:
        """Launch on the current stream, after replays of this pool on other streams.

        One ``cudaGraphLaunch`` and no other CUDA call, unless the stream changed since the last
        replay or the graph draws random numbers.

        Raises:
            ReplayError: CUDA refused the launch.
        """
        self._backend.launch(self._launch)

    def pool_memory(self) -> list[PoolBlock]:
        """Return the blocks of the pool, also those that other graphs of the backend use."""
        return blocks_of_segments(self._backend.pool_segments(), self._backend.device)

    def close(self) -> None:
        """Destroy the graph and free its share of the pool."""
        self.output, self._launch = None, _refuse_launch
        self.graph.reset()
        self._backend.graphs.discard(self)

    def _draws_random_numbers(self) -> bool:
        """Replay once, which also pays the cost of the first launch, and check the generator."""
        generator = torch.cuda.default_generators[self._backend.device_index]
        before = generator.get_offset()
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
        return bool(generator.get_offset() != before)


def _refuse_launch(_stream: Any) -> None:
    raise ReplayError("the graph is closed. Capture again.")


class CudaBackend:
    """Captures CUDA graphs into one memory pool and replays them. See ``Backend``.

    Runners that share a backend share its pool, so an output is valid until the next replay of any
    of them. Replays may come from several streams; each waits for the one before. By default all
    runners of a device share one backend (``backend_for``).

    Life cycle: ``session`` (synchronises the device, disables the garbage collector) -> ``warm_up``
    and ``capture`` (on the capture stream ``cudaStreamBeginCapture`` in thread-local mode and
    ``cudaStreamEndCapture``, then ``cudaGraphInstantiate``, ``cudaGraphUpload``, one replay) ->
    ``replay`` (``cudaGraphLaunch``) -> ``close`` of each graph (``cudaGraphExecDestroy``). The pool
    is freed with its last graph. Warm-ups, diagnoses and replays run on the caller's current
    stream. cuda-bindings are optional: without them a replay goes through ``CUDAGraph.replay``,
    graphs are not uploaded, their nodes not counted, and cuBLAS's workspace is part of the pool.

    Args:
        device: A CUDA device; without an index the current one.

    Attributes:
        name: ``cuda``.
        device: The device, with its index.
        warm_ups: 2. The first one may compile kernels and allocate what the second one and the
            capture reuse.
        pool: Id of the memory pool, from ``torch.cuda.graph_pool_handle``.
        graphs: The graphs that are not closed. Weak references: a runner that is dropped without
            ``close`` frees its graphs.
        stream: The capture stream, which runs no step.
        last_handle: Handle of the stream of the last replay; -1 before the first one.
        last_stream: The same stream as a launch takes it.

    Raises:
        DeviceError: torch finds no CUDA device.
    """

    name = "cuda"
    warm_ups = 2

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device: torch finds none. Use RecorderBackend on the CPU.")
        wanted = torch.device(device)
        given: int | None = wanted.index
        index = torch.cuda.current_device() if given is None else given
        self.device, self.device_index = torch.device("cuda", index), index
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self.stream = torch.cuda.Stream(self.device)
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.last_handle = -1
        self.last_stream: Any = None
        self._last: torch.cuda.Stream | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Select the device and disable the garbage collector; restore everything after.

        The current stream stays the caller's. Synchronises the device at both ends. Restores the
        random generator and empties torch's memory cache.
        """
        random_state = torch.cuda.get_rng_state(self.device)
        with gc_paused(), torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            if not self.graphs:  # the pool was freed with its last graph
                self.pool = torch.cuda.graph_pool_handle()
            try:
                yield
            finally:
                torch.cuda.synchronize(self.device)
                self._last = None  # all replays are done
                self.wait_for_replays()  # sets the caller's stream as that of the replays
                torch.cuda.set_rng_state(random_state, self.device)
                torch.cuda.empty_cache()  # blocks of warm-ups at large sizes seldom fit other work

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on the current stream and wait for it, also if the function fails.

        Raises:
            CaptureFailure: The function raised an exception.
        """
        note_eager_step(self.device)
        try:
            try:
                function()
            finally:
                torch.cuda.current_stream(self.device).synchronize()
        except Exception as error:
            raise failure_of(error) from error

    def capture(
        self,
        function: Callable[[], Any],
        attribution: Attribution | None = None,
        before_replay: Callable[[], None] | None = None,
    ) -> CudaGraph:
        """Capture the function, instantiate and upload the graph, and replay it once.

        Only the capture itself is on the capture stream.

        Raises:
            CaptureFailure: CUDA refused an operation, or the function raised an exception.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = self.pool_bytes()
        caller = torch.cuda.current_stream(self.device)
        try:
            allocate_workspaces(self.stream)
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                output = self._captured(graph, function, attribution)
            caller.wait_stream(self.stream)  # torch sets the graph's random offset on it
        except Exception as error:
            raise failure_of(error) from error
        graph.instantiate()
        upload(graph, caller)
        if before_replay is not None:
            try:
                before_replay()
            except BaseException:
                graph.reset()
                raise
        grown = self.pool_bytes() - before
        captured = CudaGraph(self, graph, non_owning_aliases(output), grown, attribution)
        self.graphs.add(captured)
        return captured

    @property
    def loop_refusal(self) -> str:
        """See ``Backend.loop_refusal``."""
        return loop_refusal()

    def loop(
        self,
        prologue: CudaGraph,
        bodies: Sequence[CudaGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """See ``Backend.loop``. Needs an empty ``loop_refusal``."""
        with torch.cuda.device(self.device):
            return CudaLoop(self, prologue, bodies, again, body)

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run the function on the current stream until an operation that captures refuse."""
        try:
            with compilation_disabled(), reporting_capture(), CaptureRulesMode("cuda"):
                function()
        except CaptureFailure as failure:
            return failure
        except Exception as error:
            return failure_of(error)
        finally:
            torch.cuda.synchronize(self.device)
        return None

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

    def wait_for_device(self) -> None:
        """See ``Backend.wait_for_device``."""
        torch.cuda.synchronize(self.device)

    def check_device(self) -> None:
        """Raise the device's pending error, such as an illegal address (``cudaStreamQuery``)."""
        torch.cuda.current_stream(self.device).query()

    def pool_bytes(self) -> int:
        """Return the bytes of all segments of the pool."""
        return sum(segment["total_size"] for segment in self.pool_segments())

    def pool_segments(self) -> list[dict[str, Any]]:
        """Return the segments of the pool, as in ``torch.cuda.memory_snapshot``."""
        return [
            segment
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self.pool)
        ]

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        function: Callable[[], Any],
        attribution: Attribution | None,
    ) -> Any:
        """Capture on the current stream and return the output; abandon the graph on an error."""
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            with attributing(attribution, captured_node_counter()):
                output = function()
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        return output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture, so that the next one starts clean.

        CUDA refuses to end a capture that a forbidden call invalidated. torch 2.11 then stops
        halfway: its pool keeps recording, and its random generator stays in capture mode. Ending
        an empty capture on the same stream resets both.
        """
        with warnings.catch_warnings(action="ignore"):  # "The CUDA Graph is empty"
            try:
                graph.capture_end()
            except RuntimeError:
                begin_empty_capture(self.stream)
                graph.capture_end()
        graph.reset()
