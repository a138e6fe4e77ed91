"""Observation of a forward without a graph: its operations and their memory, and its side effects.

Side effects are writes into its inputs and random draws. A graph is captured from the same code, so
that it has the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.audit.bits import first_difference_in_bits
from graphkit.audit.runs.teacher_forcing import ForwardPair, wrapped_forward
from graphkit.audit.stale_memory.pool_memory import tensor_range
from graphkit.buffers import fields_of
from graphkit.graphs import Attribution, NodeOrigin, StateSnapshot
from graphkit.graphs.attribution import attributing
from graphkit.graphs.capture_state import compilation_disabled
from graphkit.graphs.operations import OpOverload, arguments_written, storage_id, tensors_in
from graphkit.graphs.pool_memory import UNINITIALISED
from graphkit.records import Mismatch
from graphkit.runners import Output
from graphkit.runners.step import Step

Weights = nn.Module | Mapping[str, torch.Tensor] | None
"""A model, or its weights by name, to name modules by."""
_aten = torch.ops.aten
_OVERWRITING = frozenset({_aten.copy_, _aten.fill_, _aten.zero_})
"""Operations that write all of their first argument without reading it."""
SAMPLER = "sampler"
"""Name of the ``graphkit.scope`` in which a forward may draw random numbers."""


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operation that wrote memory.

    Attributes:
        name: The operation, such as ``aten::add.Tensor``.
        reads, writes: Storages that it read and wrote.
        allocates: Whether the storages that it wrote are its own results.
        values: Copies of what it wrote; ``None`` for memory that is older than the call, and for
            memory that it left uninitialised.
        outside: Tensors that it read and that are older than the call.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    allocates: bool
    values: tuple[torch.Tensor | None, ...]
    outside: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class ForwardTrace:
    """Operations of one call of a forward, in order.

    Attributes:
        origins: Module, operation and line of each.
        outputs: Storage of each field of the output.
    """

    ops: list[TracedOp] = field(default_factory=list)
    origins: list[NodeOrigin] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)


@contextmanager
def traced(
    step: Step[Any],
    call: int = 0,
    weights: Weights = None,
    after_write: Callable[[ForwardTrace], None] = lambda _trace: None,
) -> Iterator[ForwardTrace]:
    """Trace one call of the forward among those that run in the block, without a graph.

    Compiled functions run eagerly. The trace holds a copy of every intermediate result of the call.

    Args:
        step: The runner's.
        call: Index of the call; a step of drafts calls its forward several times.
        weights: The model, or its weights by name, to name modules by.
        after_write: Called after each operation of the traced call, with the trace so far.

    Yields:
        The trace, complete when the call has returned.
    """
    trace, calls = ForwardTrace(), 0

    def trace_call(forward: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return forward(inputs)
        output = trace_function(trace, lambda: forward(inputs), weights, after_write)
        if isinstance(output, Output):
            trace.outputs = {name: storage_id(tensor) for name, tensor in output.tensors().items()}
        return output

    with step.wrapped(lambda forward: wrapped_forward(forward, trace_call)):
        yield trace


def trace_function(
    trace: ForwardTrace,
    function: Callable[[], Any],
    weights: Weights = None,
    after_write: Callable[[ForwardTrace], None] = lambda _trace: None,
) -> Any:
    """Call a function, add its operations that write memory to a trace, and return its result."""
    made: set[int] = set()

    def copy(tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.detach().clone() if storage_id(tensor) in made else None

    def note(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        arguments = tensors_in((args, kwargs))
        known = {storage_id(tensor) for tensor in arguments}
        results = [tensor for tensor in tensors_in(out) if storage_id(tensor) not in known]
        changed = list(arguments_written(op, args, kwargs))
        if not results and not changed:  # a view
            return
        written = [*results, *changed]
        made.update(storage_id(tensor) for tensor in results)
        is_empty = op.overloadpacket in UNINITIALISED
        read = arguments[1:] if op.overloadpacket in _OVERWRITING else arguments
        trace.ops.append(
            TracedOp(
                name=op.name(),
                reads=tuple(storage_id(tensor) for tensor in read),
                writes=tuple(storage_id(tensor) for tensor in written),
                allocates=not changed,
                values=tuple(None if is_empty else copy(tensor) for tensor in written),
                outside=tuple(tensor for tensor in read if storage_id(tensor) not in made),
            )
        )
        after_write(trace)

    output, origins = call_observed(function, note, lambda: len(trace.ops), weights)
    trace.origins = origins or [NodeOrigin()] * len(trace.ops)
    return output


AfterOp = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], Any], None]
"""Called after an operation with its positional and named arguments, and its result."""


def call_observed(
    function: Callable[[], Any], after_op: AfterOp, count: Callable[[], int], weights: Weights
) -> tuple[Any, list[NodeOrigin]]:
    """Call a function without compilation, and return its result and the origins of its steps.

    ``count`` returns the number of steps so far. There are no origins while another thread
    attributes.
    """
    attribution = Attribution(weights)
    with compilation_disabled(), OpObserver(after_op), attributing(attribution, count):
        output = function()
    return output, attribution.origins


class OpObserver(TorchDispatchMode):
    """Calls a function after each operation."""

    def __init__(self, after_op: AfterOp) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._after_op = after_op

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and observe it."""
        out = func(*args, **(kwargs or {}))
        self._after_op(func, args, kwargs or {}, out)
        return out


@dataclass(frozen=True, slots=True)
class InputWrite:
    """A write of a forward into one of its input fields.

    Attributes:
        field: Name of the field.
        change: The first number that it changed, with its value before as the expected one;
            ``None`` if the values stayed the same.
        origin: Operation, module and line that wrote; ``None`` if that is unknown.
    """

    field: str
    change: Mismatch | None
    origin: NodeOrigin | None


class ForwardWatch:
    """Watches the forwards of a step in runs without a graph.

    Args:
        step: The runner's.
        device: Device of its tensors.
        weights: The model, or its weights by name, to name modules by.
        with_ops: Whether to watch each operation, which names its line. Compiled functions then run
            eagerly. If not, only changes of input fields are found, and no random draws.

    Attributes:
        writes: Writes into inputs so far: the first of each field.
        draws: Origins of the operations that drew random numbers outside of a sampler, each once.
        num_ops: Number of operations watched so far.
    """

    def __init__(
        self,
        step: Step[Any],
        device: torch.device,
        weights: Weights = None,
        *,
        with_ops: bool = True,
    ) -> None:
        self.writes: list[InputWrite] = []
        self.draws: list[NodeOrigin] = []
        self.num_ops = 0
        self._step, self._device, self._weights = step, device, weights
        self._with_ops = with_ops

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forwards that run in the block."""
        with self._step.wrapped(lambda forward: wrapped_forward(forward, self._call)):
            yield

    def _call(self, forward: Any, inputs: Any) -> Any:
        tensors = _input_tensors(inputs)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        writers: dict[str, NodeOrigin] = {}
        if self._with_ops:
            output = self._call_by_ops(forward, inputs, tensors, writers)
        else:
            output = forward(inputs)
        known = {write.field for write in self.writes}
        for name, tensor in tensors.items():
            change = _change(before[name], tensor, name, inputs)
            if name not in known and (change is not None or name in writers):
                self.writes.append(InputWrite(name, change, writers.get(name)))
        return output

    def _call_by_ops(
        self,
        forward: Any,
        inputs: Any,
        tensors: Mapping[str, torch.Tensor],
        writers: dict[str, NodeOrigin],
    ) -> Any:
        """Call a forward, and note the first operation that writes each of its inputs."""
        random, count = StateSnapshot({}, self._device), 0
        written, drawn = dict[str, int](), list[int]()
        ranges = {name: range(*tensor_range(tensor)) for name, tensor in tensors.items()}

        def note(
            op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any
        ) -> None:
            nonlocal random, count
            for tensor in arguments_written(op, args, kwargs):
                for name, addresses in ranges.items():
                    if tensor.numel() and tensor.data_ptr() in addresses:
                        written.setdefault(name, count)
            has_generator = any(isinstance(value, torch.Generator) for value in kwargs.values())
            if has_generator or random.drew_random_numbers():
                drawn.append(count)
                random = StateSnapshot({}, self._device)
            count += 1

        output, origins = call_observed(lambda: forward(inputs), note, lambda: count, self._weights)
        self.num_ops += count
        if origins:
            writers |= {name: origins[index] for name, index in written.items()}
            draws = (origins[index] for index in drawn)
            self.draws += [draw for draw in draws if SAMPLER not in draw.scope.split("/")]
        return output


def _input_tensors(inputs: Any) -> dict[str, torch.Tensor]:
    """Return the input fields by name, fields of the batch before fields of one forward alone.

    Of several that are the same memory, only the first.
    """
    declared = [one.name for one in fields_of(type(inputs))]
    by_address: dict[int, tuple[str, torch.Tensor]] = {}
    for name in (*declared, *(one.name for one in fields(inputs))):
        tensor = getattr(inputs, name)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            by_address.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(by_address.values())


def _change(before: torch.Tensor, now: torch.Tensor, name: str, inputs: Any) -> Mismatch | None:
    """Return the first number of a field that differs in any bit."""
    index = first_difference_in_bits(before, now)
    if index is None:
        return None
    one, other = (tensor.flatten() for tensor in (before, now))
    has_lead = any(one.lead for one in fields_of(type(inputs)) if one.name == name)
    dim = 1 if has_lead else 0
    row = int(np.unravel_index(index, now.shape)[dim])
    request = ForwardPair(inputs, {}, {}).owner(row, now.shape[dim])
    return Mismatch(
        field=name, row=row, request=request, expected=float(one[index]), got=float(other[index])
    )
