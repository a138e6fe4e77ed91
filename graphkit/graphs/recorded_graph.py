"""Recorded operations, and their replay as a graph.

CUDA graphs of a backend share one memory pool: a replay writes memory that outputs of other graphs
occupy. Recorded graphs have separate memory, so the recorder overwrites it on purpose. Code that
reads an output too late then fails on the CPU as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves

from graphkit.errors import ReplayError, error_text
from graphkit.graphs.attribution import Attribution, NodeOrigin
from graphkit.graphs.capture_state import disable_autocast
from graphkit.graphs.operations import OpOverload, schema, storage_id, tensors_in
from graphkit.graphs.pool_memory import UNINITIALISED, Allocation, PoolBlock
from graphkit.ops.registration import OPS

_NAN_BYTE = 0xFF
"""All bits set are NaN in every floating-point dtype that has one."""
_INT_BYTE = 0x80
"""Gives large negative integers, which are not an index, token or padding value."""


class GraphOutput:
    """The memory of one graph's output that its capture allocated.

    Attributes:
        session: Number of the capture session of the graph.
        memory: The memory by storage, each with the dtype of a tensor in it.
    """

    def __init__(self, output: Any, allocated: Collection[int], session: int) -> None:
        self.session = session
        self.memory: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = storage_id(leaf)
            if storage in allocated and storage not in self.memory:
                self.memory[storage] = _flat(leaf.untyped_storage(), leaf.dtype)

    def keep(self, storages: Collection[int]) -> None:
        """Never overwrite these storages: another graph reads them, so they stay allocated."""
        for storage in self.memory.keys() & storages:
            del self.memory[storage]

    def overwrite(self) -> None:
        """Write values that no step computes."""
        for memory in self.memory.values():
            if memory.dtype is torch.bool:
                memory.logical_not_()
            else:
                is_float = memory.dtype.is_floating_point or memory.dtype.is_complex
                memory.view(torch.uint8).fill_(_NAN_BYTE if is_float else _INT_BYTE)


def _flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


class OutputPool:
    """The outputs of all graphs of a recorder. Call its methods under ``replay_context``."""

    def __init__(self) -> None:
        self._outputs: WeakSet[GraphOutput] = WeakSet()
        self._current: WeakSet[GraphOutput] = WeakSet()
        """The outputs of graphs that ran after their memory was overwritten last."""
        self._session = 0

    def begin_session(self) -> None:
        """Begin a session: its captures overwrite outputs of graphs that were captured before."""
        self._session += 1

    def add(self, output: Any, allocated: Collection[int], read: Collection[int]) -> GraphOutput:
        """Add the output of a graph that has been captured and has run.

        ``read`` are the storages that the graph uses and its capture did not allocate.
        """
        for earlier in self._outputs:
            earlier.keep(read)
        self._overwrite([earlier for earlier in self._current if earlier.session < self._session])
        own = GraphOutput(output, allocated, self._session)
        self._outputs.add(own)
        self._current.add(own)
        return own

    def overwrite_others(self, own: GraphOutput) -> None:
        """Overwrite all outputs except the one of the graph that runs now."""
        self._overwrite([output for output in self._current if output is not own])
        self._current.add(own)

    def remove(self, own: GraphOutput) -> None:
        """Remove the output of a graph that is closed, and release its memory."""
        self._outputs.discard(own)
        self._current.discard(own)
        own.memory.clear()

    def _overwrite(self, outputs: Iterable[GraphOutput]) -> None:
        for output in outputs:
            output.overwrite()
            self._current.discard(output)


_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the collectives of ``torch.distributed``."""
_WRAPPER = "_c10d_functional::_wrap_tensor_autograd"
"""Wraps the tensor of a collective that may be running, and does nothing else."""


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

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    fresh: tuple[int, ...]
    with_grad: bool
    facts: OpFacts

    def run(self) -> None:
        """Run the operation again into the same storages; see ``replay_context``.

        Does nothing for an operation that leaves its results uninitialised.
        """
        if self.facts.is_uninitialised:
            return
        args: Sequence[Any] = self.args
        kwargs = self.kwargs
        if self.facts.is_foreign:  # it may transpose or squeeze its argument in place
            args = [aliased(value) for value in args]
            kwargs = {name: aliased(value) for name, value in kwargs.items()}
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
class OpFacts:
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
def op_facts(op: OpOverload) -> OpFacts:
    """Return what a recorder must know of an operation."""
    is_foreign = op.namespace not in ("aten", "graphkit")
    is_own = op.namespace == "graphkit"
    return OpFacts(
        run=OPS[schema(op).name.partition("::")[2]].reference if is_own else op,
        is_uninitialised=op.overloadpacket in UNINITIALISED,
        is_foreign=is_foreign,
        is_collective=op.namespace in _COLLECTIVES,
        is_wrapper=op.name() == _WRAPPER,
        changes_shape=torch.Tag.inplace_view in op.tags,
        is_mutable=schema(op).is_mutable,
        may_reshape=schema(op).is_mutable or is_foreign,
    )


@contextmanager
def replay_context() -> Iterator[None]:
    """Set inference mode on and autocast off, for a block that runs recorded operations.

    Results made under inference mode can only be written under it. What autocast did at capture is
    among the recorded operations.
    """
    with torch.inference_mode(), disable_autocast():
        yield


def _write(result: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a result; of expanded dimensions only their one row."""
    if 0 in result.stride():
        for dim in (i for i, stride in enumerate(result.stride()) if not stride):
            result, value = result.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    result.copy_(value)


def aliased(value: Any) -> Any:
    """Alias every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [aliased(part) for part in value] if type(value) in (list, tuple) else value


def finished(op: OpOverload, out: Any) -> Any:
    """Wait for a collective, as a stream of the device does, and return its result.

    It returned tensors and a ``Work``, or the tensor of a functional collective.
    """
    if op.namespace == "c10d":
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.ScriptObject):
                result.wait()  # type: ignore[attr-defined]  # a Work
        return out
    if isinstance(out, list):
        return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in out]
    return torch.ops._c10d_functional.wait_tensor(out)


ELEMENTS_PER_WORK = 2048
"""Elements of results that count as much as an operation; see ``RecordedGraph.work``."""


class RecordedGraph:
    """Recorded operations. Implements ``CapturedGraph``.

    Args:
        output: The captured function's result.
        ops: The operations in order.
        attribution: Of the capture, if any.
        pool: Receives the output, which replays of other graphs overwrite.
        finish_loops: Completes running loops; called before a replay.
        host: Storages in host memory, which belong to no pool.

    Attributes:
        ops: The operations in order; empty after ``close``.
        work: A cost for comparisons: 1 per operation, and 1 for every 2,048 elements of its
            results, so that small batches cost by operations and large ones by rows.
        timestamps: While a list, each replay appends the time before each operation and after the
            last one, in nanoseconds; normally ``None``.
    """

    def __init__(
        self,
        output: Any,
        ops: list[RecordedOp],
        attribution: Attribution | None,
        pool: OutputPool,
        finish_loops: Callable[[], None],
        host: Collection[int],
    ) -> None:
        self.output = output
        self.ops = tuple(ops)
        self.num_nodes = len(ops)
        self.work = len(ops) + sum(r.numel() for op in ops for r in op.results) / ELEMENTS_PER_WORK
        allocated = self._storages()
        self.pool_bytes = sum(storage.nbytes() for storage in allocated.values())
        self.origins: tuple[NodeOrigin, ...] = tuple(attribution.origins) if attribution else ()
        self.allocations: tuple[Allocation, ...] = (
            tuple(attribution.allocations) if attribution else ()
        )
        self.executable_bytes = 0
        self.timestamps: list[int] | None = None
        self._pool, self._finish_loops, self._is_closed = pool, finish_loops, False
        used = {storage_id(t) for op in ops for t in tensors_in((op.args, op.kwargs))}
        used |= {storage_id(t) for t in tree_leaves(output) if isinstance(t, torch.Tensor)}
        with replay_context():
            own = allocated.keys() - set(host)
            self._own = pool.add(output, own, used - allocated.keys())
        # The batch may have outputs of another graph. The refresh, which is first, copies them.
        self._num_reads = int(bool(ops) and ops[0].op.name() == "graphkit::refresh")

    def replay(self) -> None:
        """Run every operation again, in order, into the same storages. Blocks until done.

        Runs loops that have not ended first.
        """
        self._finish_loops()
        self.run()

    def run(self) -> None:
        """Run every operation, as a part of a loop or alone.

        Overwrites the outputs of other graphs once the inputs have been read.

        Raises:
            ReplayError: The graph is closed, or an operation raised an exception, such as an
                IndexError for a value out of range. Exceptions of collectives are raised as
                they are.
        """
        if self._is_closed:
            raise ReplayError("the graph is closed. Capture again.")
        with replay_context():
            self._run(0, self._num_reads)
            self._pool.overwrite_others(self._own)
            self._run(self._num_reads, len(self.ops))
            if self.timestamps is not None:
                self.timestamps.append(time.perf_counter_ns())

    def _run(self, begin: int, end: int) -> None:
        for index in range(begin, end):
            if self.timestamps is not None:
                self.timestamps.append(time.perf_counter_ns())
            op = self.ops[index]
            try:
                op.run()
            except Exception as error:
                if op.facts.is_collective:
                    raise
                raise self._failure(index, error) from error

    def _failure(self, index: int, error: Exception) -> ReplayError:
        source = self.origins[index].source if index < len(self.origins) else ""
        node = f"`{self.ops[index].op.name()}`" + (f" ({source})" if source else "")
        return ReplayError(
            f"node {index}, {node}, raised {error_text(error)}. Pass values in "
            "range. GRAPHKIT_CHECK=1 names the first field that is not."
        )

    def pool_memory(self) -> list[PoolBlock]:
        """Return the storages that the operations allocated. All are live: none is reused."""
        return [
            PoolBlock(torch.empty(0, dtype=torch.uint8).set_(storage), is_live=True)
            for storage in self._storages().values()
            if storage.nbytes()
        ]

    def close(self) -> None:
        """Free the operations and their storages."""
        self.ops, self.output, self._is_closed = (), None, True
        self._pool.remove(self._own)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages that the operations allocated."""
        return {storage_id(t): t.untyped_storage() for op in self.ops for t in op.results}
