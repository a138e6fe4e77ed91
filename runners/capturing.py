"""Capturing every size of a runner: warm-ups, capture, and leaving no trace of a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.buffers import InputBuffers
from graphkit.errors import CaptureError
from graphkit.graphs import Backend, CapturedGraph, CaptureFailure, SizeTable, preserved
from graphkit.records import ModeRecord, SizeRecord

WARM_UPS = 2
"""The first may build lazily what the second and the capture then reuse."""


@dataclass(frozen=True, kw_only=True)
class Capturing:
    """What it takes to capture a runner's sizes.

    Warm-ups and captures see a batch of pads alone: it is valid work that touches nothing but
    row 0 and slot 0.

    Attributes:
        table: The sizes.
        backend: What captures.
        buffers: The runner's.
        step: ``step(size)`` is captured; returns the output's tensors by name.
        mode: The forward mode's name.
        state: Tensors that a step changes.
        plan: What an attention backend does on the host before a run, given batch and size.
    """

    table: SizeTable
    backend: Backend
    buffers: InputBuffers
    step: Callable[[int], Mapping[str, torch.Tensor]]
    mode: str
    state: Mapping[str, torch.Tensor]
    plan: Callable[[Any, int], None] | None

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
            with self.backend.session(), preserved(self.state):
                for size in reversed(self.table.sizes):
                    began = time.perf_counter()
                    graphs[size] = self._one(size)
                    elapsed_ms = (time.perf_counter() - began) * 1e3
                    records.insert(0, self._size_record(size, graphs[size], elapsed_ms))
                    progress(records[0])
        except BaseException:
            for graph in graphs.values():
                graph.close()
            raise
        finally:
            self.buffers.mailbox.rewind()
        return graphs, self._mode_record(records)

    def _one(self, size: int) -> CapturedGraph:
        self.buffers.prepare(size)
        try:
            for _ in range(WARM_UPS):
                self._posted(size, self.backend.warm_up)
            captured: CapturedGraph = self._posted(size, self.backend.capture)
        except CaptureFailure as failure:
            found = self._posted(size, self.backend.diagnose) or failure
            raise CaptureError(self.mode, size, found.cause, found.where) from failure.__cause__
        return captured

    def _posted(self, size: int, run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run the step, in the way of ``run``, on a batch of pads."""
        self.buffers.mailbox.rewind()  # a failed run may have left its slot unread
        self.buffers.post_idle()
        if self.plan is not None:
            self.plan(self.buffers.view(size), size)
        return run(lambda: self.step(size))

    def _size_record(self, size: int, graph: CapturedGraph, capture_ms: float) -> SizeRecord:
        return SizeRecord(
            batch_size=size,
            num_tokens=size * self.buffers.capacity.tokens_per_request,
            num_nodes=graph.num_nodes,
            capture_ms=capture_ms,
            pool_bytes=graph.pool_bytes,
        )

    def _mode_record(self, sizes: list[SizeRecord]) -> ModeRecord:
        return ModeRecord(
            mode=self.mode,
            tokens_per_request=self.buffers.capacity.tokens_per_request,
            host_planned=self.plan is not None,
            input_bytes=self.buffers.arena.nbytes,
            sizes=tuple(sizes),
        )
