"""Capturing every size of a runner: warm-ups, capture, and leaving no trace of a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphkit.errors import CaptureError
from graphkit.graphs import Attribution, CapturedGraph, CaptureFailure, ChainedGraph, preserved
from graphkit.records import ModeRecord, SizeRecord
from graphkit.runners.known_memory import buffer_records
from graphkit.runners.parts import Parts

WARM_UPS = 2
"""The first may build lazily what the second and the capture then reuse."""


class Capturing:
    """Captures a runner's sizes.

    Warm-ups and captures see a batch of pads alone: it is valid work that touches nothing but
    row 0 and slot 0.

    Args:
        parts: The runner's.
        state: Tensors that a step changes.
        attribution: Notes what makes each node.
        batch_of: Makes the batch that warm-ups and the capture of a size see instead of pads.
    """

    def __init__(
        self,
        parts: Parts[Any],
        state: Mapping[str, torch.Tensor],
        attribution: Attribution | None = None,
        batch_of: Callable[[int], Any] | None = None,
    ) -> None:
        self._parts, self._state, self._attribution = parts, state, attribution
        self._batch_of = batch_of
        self._backend, self._buffers = parts.backend, parts.buffers

    def every_size(
        self, progress: Callable[[SizeRecord], None]
    ) -> tuple[dict[int, CapturedGraph], ModeRecord]:
        """Capture largest first, so that smaller sizes reuse its memory.

        State, random numbers and the mailbox are as before afterwards.

        Raises:
            CaptureError: A size cannot be captured; those captured before are closed again.
        """
        graphs: dict[int, CapturedGraph] = {}
        records: list[SizeRecord] = []
        try:
            with self._backend.session(), preserved(self._state):
                for size in reversed(self._parts.table.sizes):
                    began = time.perf_counter()
                    graphs[size] = self._one(size)
                    elapsed_ms = (time.perf_counter() - began) * 1e3
                    records.insert(0, self._size_record(size, graphs[size], elapsed_ms))
                    progress(records[0])
        except BaseException:
            self._close(graphs.values())
            raise
        finally:
            self._buffers.mailbox.rewind()
        return graphs, self._mode_record(records)

    def no_size(self, eager_reason: str) -> ModeRecord:
        """The record of a runner that captures nothing, and why."""
        return replace(self._mode_record([]), eager_reason=eager_reason)

    def _one(self, size: int) -> CapturedGraph:
        self._buffers.prepare(size)
        stages = self._parts.stages(size)
        graphs: list[CapturedGraph] = []
        try:
            for _ in range(WARM_UPS):
                self._post(size)
                for stage in stages:
                    self._backend.warm_up(stage)
            self._post(size)
            for stage in stages:
                graphs.append(self._backend.capture(stage, self._attribution))  # noqa: PERF401 - closed on failure
        except CaptureFailure as failure:
            self._close(graphs)
            found = self._diagnose(size, stages) or failure
            raise CaptureError(
                self._parts.mode.name, size, found.cause, found.where
            ) from failure.__cause__
        except BaseException:
            self._close(graphs)
            raise
        return graphs[0] if len(graphs) == 1 else ChainedGraph(graphs)

    def _diagnose(self, size: int, stages: Sequence[Callable[[], Any]]) -> CaptureFailure | None:
        self._post(size)
        failures = (self._backend.diagnose(stage) for stage in stages)
        return next((failure for failure in failures if failure is not None), None)

    def _post(self, size: int) -> None:
        """Make a batch of pads, or the one that was asked for, what the first stage will read."""
        self._buffers.mailbox.rewind()  # a failed run may have left its entry unread
        batch = None if self._batch_of is None else self._batch_of(size)
        if batch is None:
            self._buffers.post_idle()
        else:
            self._buffers.post(batch)
        if self._parts.plan_on_host is not None:
            self._parts.plan_on_host(batch or self._buffers.view(size), size)

    def _close(self, graphs: Iterable[CapturedGraph]) -> None:
        for graph in graphs:
            graph.close()

    def _size_record(self, size: int, graph: CapturedGraph, capture_ms: float) -> SizeRecord:
        return SizeRecord(
            batch_size=size,
            num_tokens=size * self._buffers.capacity.tokens_per_request,
            num_nodes=graph.num_nodes,
            capture_ms=capture_ms,
            pool_bytes=graph.pool_bytes,
        )

    def _mode_record(self, sizes: list[SizeRecord]) -> ModeRecord:
        return ModeRecord(
            mode=self._parts.mode.name,
            tokens_per_request=self._buffers.capacity.tokens_per_request,
            host_planned=self._parts.plan_on_host is not None,
            input_bytes=self._buffers.arena.nbytes,
            sizes=tuple(sizes),
            buffers=tuple(buffer_records(self._buffers)),
        )
