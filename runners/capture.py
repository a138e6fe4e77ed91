"""Capture of every size of a runner: warm-up, capture, and clean-up after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from graphkit.errors import CaptureError
from graphkit.graphs import (
    Attribution,
    Backend,
    CapturedGraph,
    CaptureFailure,
    SizeTable,
    StateSnapshot,
)
from graphkit.graphs.capture_failure import advice_at
from graphkit.records import ModeRecord, SizeRecord
from graphkit.runners.known_memory import buffer_records
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)


class SizeCapture:
    """Captures a step at every size of a table.

    Warm-ups and captures run on a batch of pads. Such a batch is valid and touches only row 0 and
    KV slot 0.

    Args:
        step: The step.
        table: Sizes to capture.
        backend: Backend that captures.
        mutable_state: Tensors that a step changes. They are restored after the captures.
        attribution: Records what creates each node.
        make_batch: Returns the batch to run on at a size, instead of pads.

    Attributes:
        records: Records of the sizes that ``capture`` has captured, ascending.
    """

    def __init__(
        self,
        step: Step[Any],
        table: SizeTable,
        backend: Backend,
        mutable_state: Mapping[str, torch.Tensor],
        attribution: Attribution | None = None,
        make_batch: Callable[[int], Any] | None = None,
    ) -> None:
        self._step, self._table, self._backend = step, table, backend
        self._state, self._attribution, self._make_batch = mutable_state, attribution, make_batch
        self._buffers = step.buffers
        self.records: list[SizeRecord] = []

    def capture(
        self, progress: Callable[[SizeRecord], None] | None = None
    ) -> dict[int, CapturedGraph]:
        """Capture the sizes, the largest first, so that smaller sizes reuse its memory.

        Mutable state, random generators and the mailbox are restored.

        Args:
            progress: Called after each size.

        Returns:
            The graphs by size.

        Raises:
            CaptureError: A size cannot be captured. Graphs captured before it are closed.
        """
        graphs: dict[int, CapturedGraph] = {}
        self.records = records = list[SizeRecord]()
        size, name = self._table.largest, f"{self._step.mode.name} of {self._step.name}"
        logger.info("Capturing %s, up to batch size %d.", name, size)
        try:
            with self._backend.session(), StateSnapshot(self._state, self._backend.device):
                sizes = self._table.sizes[::-1]
                runs = [partial(self._run, size) for size in self._sizes_of_kernels(sizes)]
                is_warm = self._backend.compiles_kernels and self._compile(runs)
                for size in sizes:
                    began = time.perf_counter()
                    # What the largest size has allocated serves the others.
                    warm_ups = 1 if graphs or is_warm else self._backend.warm_ups
                    graphs[size] = self._one(size, warm_ups)
                    elapsed_ms = (time.perf_counter() - began) * 1e3
                    records.insert(0, self._record(size, graphs[size], elapsed_ms))
                    logger.debug("Captured %s at %d in %.0f ms.", name, size, elapsed_ms)
                    if progress is not None:
                        progress(records[0])
        except CaptureFailure as failure:
            close_graphs(graphs.values())
            raise capture_error(self._step.mode, size, failure) from failure.__cause__
        except BaseException:
            close_graphs(graphs.values())
            raise
        finally:
            self._buffers.mailbox.rewind()
        logger.info(
            "Captured %s at batch sizes %s in %.1f s; its graphs take %.1f MiB.",
            name,
            ", ".join(str(record.batch_size) for record in records),
            sum(record.capture_ms for record in records) / 1e3,
            sum(record.pool_bytes for record in records) / 2**20,
        )
        return graphs

    @contextmanager
    def temporary_graphs(self) -> Iterator[Mapping[int, CapturedGraph]]:
        """Capture the sizes for a block, and close the graphs after it."""
        graphs = self.capture()
        try:
            yield graphs
        finally:
            close_graphs(graphs.values())

    def _compile(self, runs: Sequence[Callable[[], Any]]) -> bool:
        """Compile the kernels of runs in parallel; return whether the first had a warm-up."""
        from graphkit.graphs.compiles import compile_ahead  # not needed on a CPU

        return runs[0] not in compile_ahead(self._backend, runs)

    def _sizes_of_kernels(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the sizes, of descending ones, that need other kernels than the size before.

        Kernels divide their work by powers of two of the requests and of the rows. Those that a
        size needs beyond that are few, and compiled by its warm-up.
        """
        width, before = self._buffers.capacity.tokens_per_request, None
        for size in sizes:
            divisions = (size - 1).bit_length(), (size * width - 1).bit_length()
            if divisions != before:
                yield size
            before = divisions

    def _run(self, size: int) -> None:
        """Run the step of a size without a graph."""
        self._buffers.prepare(size)
        self._post(size)
        self._step.graph_function(size)()

    def _one(self, size: int, warm_ups: int) -> CapturedGraph:
        self._buffers.prepare(size)
        function = self._step.graph_function(size)
        try:
            for _ in range(warm_ups):
                self._post(size)
                self._backend.warm_up(function)
            self._post(size)
            return self._backend.capture(function, self._attribution)
        except CaptureFailure as failure:
            self._post(size)
            raise self._backend.diagnose(function) or failure from failure.__cause__

    def _post(self, size: int) -> None:
        """Post the batch that the next run of the step reads."""
        self._buffers.mailbox.rewind()  # a failed run may have left its entry unread
        batch = None if self._make_batch is None else self._make_batch(size)
        with self._buffers.posted(batch):
            pass
        self._step.plan_on_host(batch or self._buffers.view(size), size)

    def _record(self, size: int, graph: CapturedGraph, capture_ms: float) -> SizeRecord:
        return SizeRecord(
            batch_size=size,
            num_tokens=size * self._buffers.capacity.tokens_per_request,
            num_nodes=graph.num_nodes,
            capture_ms=capture_ms,
            pool_bytes=graph.pool_bytes,
            executable_bytes=graph.executable_bytes,
        )


def capture_error(mode: ForwardMode, batch_size: int, failure: CaptureFailure) -> CaptureError:
    """Return the error of a failed capture, with the rank that failed if ranks capture together."""
    advice = advice_at(failure.cause, failure.where)
    return CaptureError(mode.name, batch_size, failure.cause, failure.where, failure.rank, advice)


def mode_record(step: Step[Any], sizes: Sequence[SizeRecord], eager_reason: str) -> ModeRecord:
    """Return the record of a mode; ``eager_reason`` is why it has no sizes, or empty."""
    buffers = step.buffers
    return ModeRecord(
        mode=step.mode.name,
        tokens_per_request=buffers.capacity.tokens_per_request,
        host_planned=step.plans_on_host,
        input_bytes=buffers.arena.nbytes,
        sizes=tuple(sizes),
        buffers=tuple(buffer_records(buffers)),
        eager_reason=eager_reason,
    )


def close_graphs(graphs: Iterable[CapturedGraph]) -> None:
    """Close graphs."""
    for graph in graphs:
        graph.close()
