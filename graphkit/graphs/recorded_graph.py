"""Recorded operations, replayed like a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphkit.errors import ReplayError
from graphkit.graphs.attribution import Attribution, NodeOrigin
from graphkit.graphs.capture_failure import type_and_message
from graphkit.graphs.operations import storage_id, tensors_in
from graphkit.graphs.output_pool import OutputPool
from graphkit.graphs.pool_memory import Allocation, PoolBlock
from graphkit.graphs.recorded_op import RecordedOp, replay_context

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
            f"node {index}, {node}, raised {type_and_message(error)}. Pass values in "
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
