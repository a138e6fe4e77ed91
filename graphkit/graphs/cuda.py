"""The CUDA backend: captures graphs that share one memory pool, on a capture stream.

``streams`` explains why nothing but captures runs on the capture stream.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graphkit.errors import DeviceError
from graphkit.graphs.attribution import Attribution, attributing
from graphkit.graphs.backend import LoopGraph
from graphkit.graphs.capture_failure import CaptureFailure, as_capture_failure
from graphkit.graphs.capture_rules import CaptureRulesMode
from graphkit.graphs.capture_state import compilation_disabled, reporting_capture
from graphkit.graphs.cuda_graph import CudaGraph, CudaPool
from graphkit.graphs.cuda_loop import CudaLoop, no_loop_reason
from graphkit.graphs.driver import (
    begin_empty_capture,
    captured_node_counter,
    checked,
    driver_bytes,
    drop_capture,
    executable_bytes_per_node,
    runtime,
    runtime_stream,
    upload,
)
from graphkit.graphs.pool_memory import non_owning_aliases
from graphkit.graphs.streams import note_eager_step

_RUNS, _REPLAYS = 4, 3
"""Runs that ``measure`` takes the least time of, the first of which warms up, and their replays."""


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
            capture reuse. Other sizes find this, and need one, which loads their kernels and
            allocates what depends on the size.
        compiles_kernels: True.
        pool: The graphs that are not closed, their memory, and the order of their replays.
        stream: The capture stream, which runs no step.

    Raises:
        DeviceError: torch finds no CUDA device.
    """

    name = "cuda"
    warm_ups = 2
    compiles_kernels = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceError("no CUDA device: torch finds none. Use RecorderBackend on the CPU.")
        wanted = torch.device(device)
        named: int | None = wanted.index
        index = torch.cuda.current_device() if named is None else named
        self.device = torch.device("cuda", index)
        self.pool = CudaPool(self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.wait_for_replays = self.pool.wait_for_replays
        self._executable_bytes_per_node = 0.0

    def on_any_rank(self, value: bool) -> bool:
        """Return the value: a ``RankGroup`` wraps this backend for several ranks."""
        return value

    @contextmanager
    def session(self) -> Iterator[None]:
        """Select the device and disable the garbage collector; restore everything after.

        The current stream stays the caller's. Synchronises the device at both ends. Restores the
        random generator and empties torch's memory cache.
        """
        random_state = torch.cuda.get_rng_state(self.device)
        with gc_paused(), torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            self.pool.begin_session()
            try:
                yield
            finally:
                torch.cuda.synchronize(self.device)
                self.pool.end_session()
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
            raise as_capture_failure(error) from error

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
        before = self.pool.num_bytes()
        caller = torch.cuda.current_stream(self.device)
        try:
            allocate_workspaces(self.stream)
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                output = self._captured(graph, function, attribution)
            caller.wait_stream(self.stream)  # torch sets the graph's random offset on it
        except Exception as error:
            raise as_capture_failure(error) from error
        outside = driver_bytes(self.device)
        graph.instantiate()
        upload(graph, caller)
        if before_replay is not None:
            try:
                before_replay()
            except BaseException:
                graph.reset()
                raise
        grown = self.pool.num_bytes() - before
        captured = CudaGraph(self.pool, graph, non_owning_aliases(output), grown, attribution)
        captured.executable_bytes = max(0, driver_bytes(self.device) - outside)
        self.pool.graphs.add(captured)
        return captured

    @property
    def no_loop_reason(self) -> str:
        """See ``Backend.no_loop_reason``."""
        return no_loop_reason()

    def loop(
        self,
        prologue: CudaGraph,
        bodies: Sequence[CudaGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """See ``Backend.loop``. Needs an empty ``no_loop_reason``."""
        with torch.cuda.device(self.device):
            return CudaLoop(self.pool, prologue, bodies, again, body)

    def measure(self, graph: CudaGraph) -> float:
        """Return the least time of a replay of several runs, between events on the stream."""
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            times: list[float] = []
            for _ in range(_RUNS):
                begin.record()
                for _ in range(_REPLAYS):
                    graph.replay()
                end.record()
                end.synchronize()
                times.append(1e3 * begin.elapsed_time(end) / _REPLAYS)
        return min(times)

    def executable_bytes_per_node(self) -> float:
        """See ``Backend.executable_bytes_per_node``. Makes and destroys executables.

        Measured once: each measurement needs about 34 MiB of further memory, which the driver keeps
        for later executables.
        """
        if not self._executable_bytes_per_node:
            graphs = [(captured.graph, captured.num_nodes) for captured in self.pool.graphs]
            with torch.cuda.device(self.device):
                measured = executable_bytes_per_node(graphs, self.device)
            self._executable_bytes_per_node = measured
        return self._executable_bytes_per_node

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run the function on the current stream until an operation that captures refuse."""
        try:
            with compilation_disabled(), reporting_capture(), CaptureRulesMode("cuda"):
                function()
        except CaptureFailure as failure:
            return failure
        except Exception as error:
            return as_capture_failure(error)
        finally:
            torch.cuda.synchronize(self.device)
        return None

    def wait_for_device(self) -> None:
        """See ``Backend.wait_for_device``."""
        torch.cuda.synchronize(self.device)

    def check_device(self) -> None:
        """Raise the device's pending error, such as an illegal address (``cudaStreamQuery``)."""
        torch.cuda.current_stream(self.device).query()

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        function: Callable[[], Any],
        attribution: Attribution | None,
    ) -> Any:
        """Capture on the current stream and return the output; abandon the graph on an error."""
        try:
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
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
        halfway: its pool keeps recording, and its random generator stays in capture mode
        (https://github.com/pytorch/pytorch/pull/180395). Ending an empty capture on the same stream
        resets both. Does not raise where torch has not begun a capture, so that callers see why.
        """
        with warnings.catch_warnings(action="ignore"):  # "The CUDA Graph is empty"
            try:
                graph.capture_end()
            except RuntimeError:
                begin_empty_capture(self.stream)
                try:
                    graph.capture_end()
                except RuntimeError:
                    drop_capture(self.stream)
        graph.reset()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect once, then disable the garbage collector for a block.

    A collection may free device memory, which CUDA refuses during a capture. Does nothing if the
    collector is already disabled, so nested blocks collect once: a collection takes about 100 ms
    in a large process.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocate_workspaces(stream: torch.cuda.Stream) -> None:
    """Let torch allocate the workspaces of cuBLAS and cuBLASLt for a stream. Runs no kernel.

    torch 2.11 allocates them at the first matrix product on a stream and keeps them for it. If that
    product is part of a capture, they belong to the pool of its graph: the pool is not freed with
    its graphs, and another capture of the same step has another memory layout
    (https://github.com/pytorch/pytorch/pull/193832).

    Captures a product without torch and drops the graph, since torch has no function that allocates
    the workspace of cuBLASLt. Without cuda-bindings, only cuBLAS gets its workspace.

    Args:
        stream: Must not be capturing. Not the default stream.
    """
    bindings = runtime()
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
        if bindings is None:
            return
        square = torch.empty(16, 16, device=stream.device, dtype=torch.float32)  # any size
        # torch maps memory meanwhile, which CUDA refuses in the other modes.
        mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        checked(bindings.cudaStreamBeginCapture(runtime_stream(stream), mode))
        try:
            with suppress(RuntimeError):  # torch has allocated the workspace before it can fail
                torch.addmm(square[0], square, square)  # with a bias, torch calls cuBLASLt
        finally:
            drop_capture(stream)
