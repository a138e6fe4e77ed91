"""A backend without CUDA: records the operations of a function and runs them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphkit.errors import CaptureCause
from graphkit.graphs.attribution import Attribution, NodeOrigin, attributing
from graphkit.graphs.backend import LoopGraph
from graphkit.graphs.capture_failure import failure_of
from graphkit.graphs.capture_rules import CaptureRulesMode, tensors_in
from graphkit.graphs.collectives import finished, is_collective, is_wrapper
from graphkit.graphs.dispatch_modes import compilation_disabled
from graphkit.graphs.host_calls import HostCallsMode, HostTensors
from graphkit.graphs.pool_memory import UNINITIALISED, Allocation, PoolBlock
from graphkit.graphs.recorded_loop import RecordedLoop
from graphkit.ops.registration import OPS


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation with the arguments of its capture.

    Attributes:
        op: The ATen or custom operation.
        args: Its positional arguments; tensors share the storage of the captured ones.
        kwargs: Its keyword arguments.
        results: The tensors whose storage it allocated; a replay writes them again.
        fresh: Indices of ``results`` among all tensors that the operation returned.
        with_grad: Whether gradients were enabled; some operations then return more tensors.
        facts: What the recorder knows of ``op``.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    fresh: tuple[int, ...]
    with_grad: bool
    facts: _OpFacts

    def run(self) -> None:
        """Run the operation again into the same storages; see ``replay_context``.

        Does nothing for an operation that leaves its results uninitialised.
        """
        if self.facts.is_uninitialised:
            return
        args: Sequence[Any] = self.args
        kwargs = self.kwargs
        if self.facts.is_foreign:  # it may transpose or squeeze its argument in place
            args = [_aliased(value) for value in args]
            kwargs = {name: _aliased(value) for name, value in kwargs.items()}
        if self.with_grad:
            with torch.enable_grad():
                out = self.op(*args, **kwargs)
        else:
            out = self.facts.run(*args, **kwargs)
        if self.facts.is_collective:
            out = finished(self.op, out)
        if self.fresh:
            tensors = [out] if isinstance(out, torch.Tensor) else tensors_in(out)
            for index, result in zip(self.fresh, self.results, strict=True):
                _write(result, tensors[index])


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What a recorder must know of an operation. Reading it from torch takes microseconds.

    Attributes:
        run: Runs it in a replay. graphkit's ops run their references: the capture has checked the
            arguments.
    """

    run: Callable[..., Any]
    is_uninitialised: bool
    is_foreign: bool
    is_collective: bool
    is_wrapper: bool
    changes_shape: bool
    is_mutable: bool
    may_reshape: bool


@cache
def _facts_of(op: torch._ops.OpOverload) -> _OpFacts:
    is_foreign = op.namespace not in ("aten", "graphkit")
    is_own = op.namespace == "graphkit"
    return _OpFacts(
        run=OPS[op._schema.name.partition("::")[2]].reference if is_own else op,
        is_uninitialised=op.overloadpacket in UNINITIALISED,
        is_foreign=is_foreign,
        is_collective=is_collective(op),
        is_wrapper=is_wrapper(op),
        changes_shape=torch.Tag.inplace_view in op.tags,
        is_mutable=op._schema.is_mutable,
        may_reshape=op._schema.is_mutable or is_foreign,
    )


_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)


def is_recording() -> bool:
    """Return whether a recorder captures now: tensors on the CPU then stand for the device's."""
    return _is_recording.get()


def is_capturing() -> bool:
    """Return whether a backend captures now, so that values of tensors cannot be read."""
    if is_recording():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def replay_context() -> Iterator[None]:
    """Set inference mode on and autocast off, for a block that runs recorded operations.

    Results made under inference mode can only be written under it. What autocast did at capture is
    among the recorded operations.
    """
    with torch.inference_mode(), torch._C._DisableAutocast():
        yield


class RecordedGraph:
    """Recorded operations. Implements ``CapturedGraph``.

    Attributes:
        ops: The operations in order; empty after ``close``.
        timestamps: While a list, each replay appends the time before each operation and after the
            last one, in nanoseconds; normally ``None``.
    """

    def __init__(
        self, output: Any, ops: list[RecordedOp], attribution: Attribution | None = None
    ) -> None:
        self.output = output
        self.ops = tuple(ops)
        self.num_nodes = len(ops)
        self.pool_bytes = _storage_bytes(ops)
        self.origins: tuple[NodeOrigin, ...] = tuple(attribution.origins) if attribution else ()
        self.allocations: tuple[Allocation, ...] = (
            tuple(attribution.allocations) if attribution else ()
        )
        self.timestamps: list[int] | None = None

    def replay(self) -> None:
        """Run every operation again, in order, into the same storages. Blocks until done."""
        with replay_context():
            if self.timestamps is not None:
                self._replay_timed(self.timestamps)
                return
            for op in self.ops:
                op.run()

    def _replay_timed(self, timestamps: list[int]) -> None:
        for op in self.ops:
            timestamps.append(time.perf_counter_ns())
            op.run()
        timestamps.append(time.perf_counter_ns())

    def pool_memory(self) -> list[PoolBlock]:
        """Return the storages that the operations allocated. All are live: none is reused."""
        storages = {_storage(t): t.untyped_storage() for op in self.ops for t in op.results}
        return [
            PoolBlock(torch.empty(0, dtype=torch.uint8).set_(storage), is_live=True)
            for storage in storages.values()
            if storage.nbytes()
        ]

    def close(self) -> None:
        """Free the operations and their storages."""
        self.ops, self.output = (), None


class RecorderBackend:
    """Captures and replays on the CPU, to check correctness without a GPU. See ``Backend``.

    A recorded graph freezes what a CUDA graph freezes: Python does not run again, host scalars
    keep their values, and every tensor keeps its address. A capture refuses operations that read
    device values on the host or whose shape depends on them. Compiled functions are recorded
    eagerly.

    The device is the CPU, so the recorder derives which tensors CUDA code would hold on the host:
    those made during the capture of Python or NumPy data without ``device=``, those made on the
    literal device ``"cpu"``, and those computed from these alone. It refuses to copy them to the
    device, and device tensors to the literal ``"cpu"``: CUDA cannot capture copies of memory that
    is not pinned. Values of host tensors may be read.

    A CPU cannot show:

    - host tensors that no call identifies: those made before the capture, by ``frombuffer``, and
      by ``zeros`` or ``arange`` without ``device=`` count as device tensors;
    - pinned memory: ``pin_memory`` needs CUDA, and ``.to("cpu", non_blocking=True)`` is accepted;
    - errors of tensors on different devices, and host operations that a graph does not repeat: a
      replay repeats them;
    - CUDA kernels that synchronise where the CPU kernel does not, other than ``grouped_mm``,
      ``histc`` without a range, ``linspace`` of tensors and the error checks of ``torch.linalg``;
      ``linalg.svd`` is one of them;
    - values that a custom op reads inside of its kernel;
    - generators that are registered with a graph: it refuses all but the default one;
    - work that is no torch operation, such as writes through NumPy: it runs at capture and is
      missing at replay;
    - the order of work on several streams: operations run one after the other;
    - reuse of pool memory by other graphs: every graph keeps its own storages;
    - the times and the memory of CUDA kernels.

    Attributes:
        name: ``recorder``.
        device: The CPU.
        warm_ups: 1, which creates lazy state. There are no kernels to compile and no memory pool
            to fill.
    """

    name = "recorder"
    warm_ups = 1
    loop_refusal = ""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Restore the CPU's random generator when the block ends."""
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
            raise failure_of(error) from error

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
        token = _is_recording.set(True)
        try:
            with (
                compilation_disabled(),
                HostCallsMode(recorder.host),
                recorder,
                attributing(attribution, lambda: len(recorder.ops)),
            ):
                output = function()
        except Exception as error:
            raise failure_of(error) from error
        finally:
            _is_recording.reset(token)
        if before_replay is not None:
            before_replay()
        return RecordedGraph(output, recorder.ops, attribution)

    def loop(
        self,
        prologue: RecordedGraph,
        bodies: Sequence[RecordedGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> LoopGraph:
        """See ``Backend.loop``. The host reads the conditions."""
        return RecordedLoop(prologue, bodies, again, body)

    def diagnose(self, function: Callable[[], Any]) -> None:
        """Do nothing: ``capture`` names the operation itself."""

    def wait_for_replays(self) -> None:
        """Do nothing: there are no streams."""

    def wait_for_device(self) -> None:
        """Do nothing: replays block until they are done."""

    def check_device(self) -> None:
        """Do nothing: errors are raised by the replay itself."""


class _Recorder(CaptureRulesMode):
    """Records every operation that writes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.host = HostTensors()

    def refusal(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CaptureCause | None:
        """Return why a capture on CUDA refuses this operation; ``None`` if it accepts it."""
        if self.host.hold_all((args, kwargs)):  # runs on the host
            return None
        return self.host.refusal_of(func, args) or super().refusal(func, args, kwargs)

    def run_allowed(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation and record it."""
        facts = _facts_of(func)
        if facts.changes_shape:  # of a tensor, and no memory
            return func(*args, **kwargs)
        if facts.is_wrapper:  # the collective has finished
            return args[0]
        # Half of all operations are views, whose arguments need no aliases.
        kept = _kept(args, kwargs) if facts.may_reshape else None
        with torch._C.DisableTorchFunction():  # host reads inside an operation are its own matter
            out = func(*args, **kwargs)
            if facts.is_collective:
                out = finished(func, out)
        # Python and NumPy data becomes a tensor through this operation.
        if func is torch.ops.aten.lift_fresh.default or self.host.hold_all((args, kwargs)):
            self.host.add(out)
        tensors = tensors_in(out)
        given = {_storage(tensor) for tensor in tensors_in((args, kwargs))} if tensors else set()
        fresh = tuple(i for i, tensor in enumerate(tensors) if _storage(tensor) not in given)
        # A view of an argument writes nothing. Schemas of collectives do not say what they write.
        if fresh or facts.is_mutable or facts.is_collective:
            results = tuple(tensors[i].detach() for i in fresh)
            with_grad = torch.is_grad_enabled()
            kept = kept or _kept(args, kwargs)
            self.ops.append(RecordedOp(func, *kept, results, fresh, with_grad, facts))
        return out


def _write(result: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a result; of expanded dimensions only their one row."""
    if 0 in result.stride():
        for dim in (i for i, stride in enumerate(result.stride()) if not stride):
            result, value = result.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    result.copy_(value)


def _kept(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Alias every tensor of the arguments, which keeps its shape and strides."""
    return tuple(map(_aliased, args)), {name: _aliased(each) for name, each in kwargs.items()}


def _aliased(value: Any) -> Any:
    """Alias every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_aliased(each) for each in value] if type(value) in (list, tuple) else value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_bytes(ops: list[RecordedOp]) -> int:
    sizes = {_storage(t): t.untyped_storage().nbytes() for op in ops for t in op.results}
    return sum(sizes.values())
