"""A backend without CUDA: records the operations of a function and runs them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphkit.errors import CaptureCause
from graphkit.graphs.attribution import Attribution, attributing
from graphkit.graphs.backend import LoopGraph
from graphkit.graphs.capture_failure import as_capture_failure
from graphkit.graphs.capture_rules import CaptureRulesMode
from graphkit.graphs.capture_state import compilation_disabled, disable_function_modes, recording
from graphkit.graphs.host_calls import HostCallsMode, HostTensors
from graphkit.graphs.operations import OpOverload, storage_id, tensors_in
from graphkit.graphs.recorded_graph import (
    OutputPool,
    RecordedGraph,
    RecordedOp,
    aliased,
    finished,
    op_facts,
)
from graphkit.graphs.recorded_loop import LoopQueue, RecordedLoop


class RecorderBackend:
    """Captures and replays on the CPU, to check correctness without a GPU. See ``Backend``.

    A recorded graph freezes what a CUDA graph freezes: Python does not run again, host scalars
    keep their values, and every tensor keeps its address. A capture refuses operations that read
    device values on the host or whose shape depends on them. During a capture
    ``torch.cuda.is_current_stream_capturing()`` is true. Compiled functions are recorded eagerly.

    The device is the CPU, so the recorder derives which tensors CUDA code would hold on the host:
    those made during the capture of Python or NumPy data without ``device=``, those made on the
    literal device ``"cpu"``, and those computed from these alone. It refuses to copy them to the
    device, and device tensors to the literal ``"cpu"``: CUDA cannot capture copies of memory that
    is not pinned. Values of host tensors may be read.

    Graphs of a backend share a memory pool: a replay overwrites the outputs of the other graphs
    once it has read its inputs, floating-point numbers with NaN. Replays and loops run in the order
    of their launches. A loop advances when the host waits for it; a replay runs it to its end.

    The page "Recorder limits" of the documentation lists what a CPU cannot show, and what the
    recorder does there.

    Attributes:
        name: ``recorder``.
        device: The CPU.
        warm_ups: 1, which creates lazy state. There is no memory pool to fill.
        compiles_kernels: False.
    """

    name = "recorder"
    warm_ups = 1
    compiles_kernels = False
    no_loop_reason = ""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._pool, self._queue = OutputPool(), LoopQueue()

    def on_any_rank(self, value: bool) -> bool:
        """Return the value: a ``RankGroup`` wraps this backend for several ranks."""
        return value

    @contextmanager
    def session(self) -> Iterator[None]:
        """Complete running loops, and restore the CPU's random generator when the block ends."""
        self._queue.finish()
        self._pool.begin_session()
        state = torch.random.get_rng_state()
        try:
            yield
        finally:
            torch.random.set_rng_state(state)

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function once.

        Raises:
            CaptureFailure: The function raised an exception.
        """
        try:
            function()
        except Exception as error:
            raise as_capture_failure(error) from error

    def capture(
        self,
        function: Callable[[], Any],
        attribution: Attribution | None = None,
        before_replay: Callable[[], None] | None = None,
    ) -> RecordedGraph:
        """Run the function once and record its operations.

        Raises:
            CaptureFailure: An operation was refused, or the function raised an exception.
        """
        recorder = _Recorder()
        try:
            with (
                compilation_disabled(),
                recording(),
                HostCallsMode(recorder.host),
                recorder,
                attributing(attribution, lambda: len(recorder.ops)),
            ):
                output = function()
        except Exception as error:
            raise as_capture_failure(error) from error
        if before_replay is not None:
            before_replay()
        return RecordedGraph(
            output,
            recorder.ops,
            attribution,
            self._pool,
            self._queue.finish,
            recorder.host.storages,
        )

    def loop(
        self,
        prologue: RecordedGraph,
        bodies: Sequence[RecordedGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """See ``Backend.loop``. The host reads the conditions."""
        return RecordedLoop(self._queue, prologue, bodies, again, body)

    def measure(self, graph: RecordedGraph) -> float:
        """Replay the graph and return its counted work; see ``RecordedGraph.work``."""
        graph.replay()
        return graph.work

    def executable_bytes_per_node(self) -> float:
        """Return 0.0: recorded graphs have no executable."""
        return 0.0

    def diagnose(self, function: Callable[[], Any]) -> None:
        """Do nothing: ``capture`` names the operation itself."""

    def wait_for_replays(self) -> None:
        """Complete running loops. There are no streams."""
        self._queue.finish()

    def wait_for_device(self) -> None:
        """See ``Backend.wait_for_device``: run loops to their end."""
        self._queue.finish()

    def check_device(self) -> None:
        """Let a loop advance that runs: the caller waits for it. A replay raises its own errors."""
        self._queue.advance()


class _Recorder(CaptureRulesMode):
    """Records every operation that writes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.host = HostTensors()

    def cause(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CaptureCause | None:
        """Return why a capture on CUDA refuses this operation; ``None`` if it accepts it."""
        if self.host.hold_all((args, kwargs)):  # runs on the host
            return None
        return self.host.cause(func, args) or super().cause(func, args, kwargs)

    def run_allowed(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation and record it."""
        facts = op_facts(func)
        if facts.changes_shape:  # of a tensor, and no memory
            return func(*args, **kwargs)
        if facts.is_wrapper:  # the collective has finished
            return args[0]
        # Half of all operations are views, whose arguments need no aliases.
        kept = _kept(args, kwargs) if facts.may_reshape else None
        with disable_function_modes():  # host reads inside an operation are its own matter
            out = func(*args, **kwargs)
            if facts.is_collective:
                out = finished(func, out)
        # Python and NumPy data becomes a tensor through this operation.
        if func is torch.ops.aten.lift_fresh.default or self.host.hold_all((args, kwargs)):
            self.host.add(out)
        tensors = tensors_in(out)
        passed = {storage_id(tensor) for tensor in tensors_in((args, kwargs))} if tensors else set()
        fresh = tuple(i for i, tensor in enumerate(tensors) if storage_id(tensor) not in passed)
        # A view of an argument writes nothing. Schemas of collectives do not say what they write.
        if fresh or facts.is_mutable or facts.is_collective:
            results = tuple(tensors[i].detach() for i in fresh)
            with_grad = torch.is_grad_enabled()
            kept = kept or _kept(args, kwargs)
            self.ops.append(RecordedOp(func, *kept, results, fresh, with_grad, facts))
        return out


def _kept(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Alias every tensor of the arguments, which keeps its shape and strides."""
    return tuple(map(aliased, args)), {name: aliased(value) for name, value in kwargs.items()}
