"""Interfaces of backends and of captured graphs.

Life cycle of a graph: ``capture`` -> ``replay`` any number of times -> ``close``. Captures happen
inside a ``session``, which prepares the process and restores it afterwards, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graphkit.graphs.attribution import Attribution, NodeOrigin
from graphkit.graphs.capture_failure import CaptureFailure
from graphkit.graphs.pool_memory import Allocation, PoolBlock


class CapturedGraph(Protocol):
    """One captured step.

    Attributes:
        output: The captured function's result. Its tensors alias graph memory: they are valid from
            a replay until the next replay of any graph of the same pool, and until ``close``.
        num_nodes: Number of nodes (CUDA; 0 without cuda-bindings) or of operations (recorder).
        pool_bytes: Bytes that the capture added to the backend's pool.
        executable_bytes: Bytes that the driver allocated for the executable; 0 on the recorder.
        origins: Origin of each node, in order of creation; empty without attribution.
        allocations: Memory that its operations allocated, in order; empty without attribution.
    """

    output: Any
    num_nodes: int
    pool_bytes: int
    executable_bytes: int
    origins: tuple[NodeOrigin, ...]
    allocations: tuple[Allocation, ...]

    def replay(self) -> None:
        """Run the step again on the memory that its capture used.

        Enqueues on the current stream, after earlier replays of the backend on any stream. Does
        not wait for the result.

        Raises:
            ReplayError: CUDA refused the launch.
        """
        ...

    def pool_memory(self) -> list[PoolBlock]:
        """Return the blocks of memory that captures allocated and replays use.

        On CUDA all graphs of a backend share them. Valid until the next capture or ``close``.
        """
        ...

    def close(self) -> None:
        """Free the graph. Neither the graph nor its output may be used afterwards."""
        ...


class LoopGraph(CapturedGraph, Protocol):
    """A graph that runs a prologue, and then one of several bodies until the device ends it."""

    def poll(self) -> None:
        """Let the loop advance, where it runs on the host; call it while waiting for a result."""
        ...

    def join(self) -> None:
        """Make later work of the current stream run after the loop."""
        ...

    def wait(self) -> None:
        """Wait until all launches have ended."""
        ...


class Backend(Protocol):
    """Captures functions and replays them.

    Life cycle: ``warm_up`` and ``capture`` inside a ``session``, then replays. One backend serves
    any number of graphs; it holds no resource that must be closed beside them. For one thread at a
    time.

    Attributes:
        name: ``cuda`` or ``recorder``.
        device: The device of the captured functions' tensors.
        warm_ups: Runs of a function before its first capture. Captures of other sizes of the
            function have one.
        compiles_kernels: Whether ``compile_ahead`` runs functions before their warm-up, so that
            their kernels are compiled in parallel.
    """

    name: str
    device: torch.device
    warm_ups: int
    compiles_kernels: bool

    def on_any_rank(self, value: bool) -> bool:
        """Return whether a value is true on any rank that captures together with this one.

        Raises:
            CaptureFailure: A rank did not arrive.
        """
        ...

    @property
    def no_loop_reason(self) -> str:
        """Reason why ``loop`` is not available, or an empty string."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Prepare the process for captures, and restore it when the block ends.

        The current stream does not change: warm-ups, and what else runs in the block, run on it.
        """
        ...

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function without capturing it, on the current stream, and wait.

        Raises:
            CaptureFailure: The function raised an exception.
        """
        ...

    def capture(
        self,
        function: Callable[[], Any],
        attribution: Attribution | None = None,
        before_replay: Callable[[], None] | None = None,
    ) -> CapturedGraph:
        """Capture the function and run the graph once. Call it inside a ``session``.

        Args:
            function: Takes no arguments. Its result becomes the graph's ``output``.
            attribution: Records the origin of each node.
            before_replay: Called when the graph exists, before it runs. If it raises, nothing of
                the attempt remains.

        Raises:
            CaptureFailure: The function cannot be captured. Nothing of the attempt remains.
        """
        ...

    def loop(
        self,
        prologue: Any,
        bodies: Sequence[Any],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """Compose captured graphs into a loop that needs no host.

        A launch runs the prologue and one body, and another body while ``again`` is not 0 then.
        Prologue and bodies write the two tensors on the device.

        Args:
            prologue: A graph of this backend.
            bodies: Graphs of this backend. Prologue and bodies must stay open.
            again: Whether another body runs, int32 [1].
            body: Index of the next body, int32 [1].

        Raises:
            DeviceError: CUDA refused the graph.
        """
        ...

    def measure(self, graph: Any) -> float:
        """Return the cost of a replay of a graph of this backend: microseconds on CUDA.

        The recorder returns counted work, which is the same in every run. Waits for the device.
        """
        ...

    def executable_bytes_per_node(self) -> float:
        """Return the driver's memory of an executable per node, measured on the open graphs.

        0.0 on the recorder, without open graphs and without cuda-bindings. Waits for the device.
        """
        ...

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run a function whose capture failed again without a graph, to find the operation.

        Returns:
            The failure with its operation and line; ``None`` if nothing new was found.
        """
        ...

    def wait_for_replays(self) -> None:
        """Make the current stream wait for replays that this backend enqueued on another stream.

        Where loops run on the host, they run to their end. ``CapturedGraph.replay`` does so itself.
        """
        ...

    def wait_for_device(self) -> None:
        """Wait until the device has finished all enqueued work, loops included."""
        ...

    def check_device(self) -> None:
        """Raise the device's pending error, such as an illegal memory access.

        Called by a host that waits. Where loops run on the host, the oldest one advances.
        """
        ...
