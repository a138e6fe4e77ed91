"""A backend for any machine: records the operations of a function and runs the list again.

It is for trust, not for speed. What a CUDA graph freezes is frozen here as well: Python does not
run again, host scalars keep their value, every tensor keeps its address. What a capture refuses is
refused here as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from graphkit.graphs.attribution import Attribution, Place, noting
from graphkit.graphs.failures import failure_of
from graphkit.graphs.refusing import HostReads, RefusingMode, as_written


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation with its very arguments.

    Attributes:
        op: The ATen or custom operation.
        args: Its positional arguments; tensors keep their storage.
        kwargs: Its keyword arguments.
        results: The tensors that it made, each to be written again at replay.
        fresh: Which of the call's tensor results those are.
        with_grad: Whether gradients were on; some operations then make more.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    fresh: tuple[int, ...]
    with_grad: bool

    def run(self) -> None:
        """Run it again into the same storages."""
        # Aliases, since an operation may turn or squeeze its very argument.
        args = [_aliased(value) for value in self.args]
        kwargs = {name: _aliased(value) for name, value in self.kwargs.items()}
        with torch.set_grad_enabled(self.with_grad):
            out = self.op(*args, **kwargs)
        made = (out,) if isinstance(out, torch.Tensor) else _tensors(out)
        for index, result in zip(self.fresh, self.results, strict=True):
            _write(result, made[index])


@contextmanager
def as_recorded() -> Iterator[None]:
    """For a block in which recorded operations run again, whatever is set around it.

    Results made under inference_mode may only be written under it; others do not mind. What
    autocast did to an operation was recorded.
    """
    with torch.inference_mode(), torch._C._DisableAutocast():
        yield


class RecordedGraph:
    """A list of operations that can be run again. See ``CapturedGraph``."""

    def __init__(self, output: Any, ops: list[RecordedOp], places: Sequence[Place] = ()) -> None:
        self.output = output
        self.ops = tuple(ops)
        self.num_nodes = len(ops)
        self.pool_bytes = _storage_bytes(ops)
        self.places = tuple(places)
        self.stopwatch: list[int] | None = None
        """A list, while somebody measures: each replay appends the time before each operation and
        after the last, in nanoseconds."""

    def replay(self) -> None:
        """Run every operation again, in order, into the same storages."""
        with as_recorded():
            if self.stopwatch is not None:
                self._replay_timed(self.stopwatch)
                return
            for op in self.ops:
                op.run()

    def _replay_timed(self, stopwatch: list[int]) -> None:
        for op in self.ops:
            stopwatch.append(time.perf_counter_ns())
            op.run()
        stopwatch.append(time.perf_counter_ns())

    def close(self) -> None:
        """Drop the list, and with it the storages."""
        self.ops, self.output = (), None


class RecorderBackend:
    """Captures on the CPU. See ``Backend``."""

    name = "recorder"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing to prepare but the random state, which captures must not advance."""
        state = torch.random.get_rng_state()
        try:
            yield
        finally:
            torch.random.set_rng_state(state)

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function once."""
        try:
            function()
        except Exception as error:
            raise failure_of(error) from error

    def capture(
        self, function: Callable[[], Any], attribution: Attribution | None = None
    ) -> RecordedGraph:
        """Run the function once and keep its operations."""
        recorder = _Recorder()
        try:
            with (
                as_written(),
                HostReads(),
                recorder,
                noting(attribution, lambda: len(recorder.ops)),
            ):
                output = function()
        except Exception as error:
            raise failure_of(error) from error
        return RecordedGraph(output, recorder.ops, attribution.places if attribution else ())

    def diagnose(self, function: Callable[[], Any]) -> None:
        """A capture here names the operation at once."""

    def order(self) -> None:
        """There are no streams."""

    def is_alive(self) -> None:
        """Replays end before they return."""


class _Recorder(RefusingMode):
    """Keeps every operation that writes something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []

    def ran(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation and keep it."""
        if torch.Tag.inplace_view in func.tags:  # changes the tensor's shape, nothing in memory
            return func(*args, **kwargs)
        kept_args, kept_kwargs = tree_map(_alias, (args, kwargs))
        with torch._C.DisableTorchFunction():  # an op's own code may read what it likes
            out = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = _tensors(out)
        fresh = tuple(i for i, tensor in enumerate(made) if _storage(tensor) not in given)
        if fresh or func._schema.is_mutable:  # a view needs no second run: its storage is given
            results = tuple(_alias(made[i]) for i in fresh)
            with_grad = torch.is_grad_enabled()
            self.ops.append(RecordedOp(func, kept_args, kept_kwargs, results, fresh, with_grad))
        return out


def _write(result: torch.Tensor, value: torch.Tensor) -> None:
    """Copy; where a tensor was expanded, its one row alone."""
    if 0 in result.stride():
        for dim in (i for i, stride in enumerate(result.stride()) if not stride):
            result, value = result.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    result.copy_(value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _alias(leaf: Any) -> Any:
    """The same memory with a shape of its own."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _aliased(value: Any) -> Any:
    """An argument with every tensor aliased, as pytree would do it, in less time."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_aliased(each) for each in value] if type(value) in (list, tuple) else value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_bytes(ops: list[RecordedOp]) -> int:
    sizes = {_storage(t): t.untyped_storage().nbytes() for op in ops for t in op.results}
    return sum(sizes.values())
