"""The operations of one call of a forward without a graph: results, memory and origin of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.audit.runs.teacher_forcing import wrapped_forward
from graphkit.graphs import Attribution
from graphkit.graphs.attribution import NodeOrigin, attributing
from graphkit.graphs.capture_state import compilation_disabled
from graphkit.graphs.operations import OpOverload, arguments_written, storage_id, tensors_in
from graphkit.graphs.pool_memory import UNINITIALISED
from graphkit.runners import Output
from graphkit.runners.step import Step

Weights = nn.Module | Mapping[str, torch.Tensor] | None
"""A model, or its weights by name, to name modules by."""
_aten = torch.ops.aten
_OVERWRITING = frozenset({_aten.copy_, _aten.fill_, _aten.zero_})
"""Operations that write all of their first argument without reading it."""


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
