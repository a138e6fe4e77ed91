"""Capturing every size of a runner: warm-ups, capture, and leaving no trace of a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphkit.buffers import InputBuffers
from graphkit.errors import CaptureError
from graphkit.graphs import Backend, CapturedGraph, CaptureFailure, SizeTable
from graphkit.records import ModeRecord, SizeRecord

WARM_UPS = 2
"""The first may build lazily what the second and the capture then reuse."""


def capture_all(
    table: SizeTable,
    backend: Backend,
    buffers: InputBuffers,
    step: Callable[[int], Any],
    *,
    mode: str,
    state: Mapping[str, torch.Tensor],
    plan: Callable[[Any, int], None] | None,
    progress: Callable[[SizeRecord], None],
) -> tuple[dict[int, CapturedGraph], ModeRecord]:
    """Capture ``step(size)`` for every size, largest first so that smaller ones reuse its memory.

    Warm-ups and captures see a batch of pads alone: it is valid work that touches nothing but
    row 0 and slot 0. State, random numbers and the mailbox are as before afterwards.

    Args:
        plan: What an attention backend does on the host before each run, given batch and size.

    Raises:
        CaptureError: A size cannot be captured; those captured before are closed again.
    """
    graphs: dict[int, CapturedGraph] = {}
    records = []
    try:
        with backend.session(), _preserved(state):
            for size in reversed(table.sizes):
                began = time.perf_counter()
                graphs[size] = _capture_one(size, backend, buffers, step, mode, plan)
                elapsed = (time.perf_counter() - began) * 1e3
                records.append(_record_of(size, buffers, graphs[size], elapsed))
                progress(records[-1])
    except BaseException:
        for graph in graphs.values():
            graph.close()
        raise
    finally:
        buffers.mailbox.rewind()
    return graphs, ModeRecord(
        mode=mode,
        tokens_per_request=buffers.capacity.tokens_per_request,
        host_planned=plan is not None,
        input_bytes=buffers.arena.nbytes,
        sizes=tuple(reversed(records)),
    )


def _capture_one(
    size: int,
    backend: Backend,
    buffers: InputBuffers,
    step: Callable[[int], Any],
    mode: str,
    plan: Callable[[Any, int], None] | None,
) -> CapturedGraph:
    buffers.prepare(size)

    def posted(run: Callable[[Callable[[], Any]], Any]) -> Any:
        buffers.mailbox.rewind()  # a failed run may have left its slot unread
        buffers.post_idle()
        if plan is not None:
            plan(buffers.view(size), size)
        return run(lambda: step(size))

    try:
        for _ in range(WARM_UPS):
            posted(backend.warm_up)
        return posted(backend.capture)  # type: ignore[no-any-return]
    except CaptureFailure as failure:
        found = posted(backend.diagnose) or failure
        raise CaptureError(mode, size, found.cause, found.where) from failure.__cause__


def _record_of(
    size: int, buffers: InputBuffers, graph: CapturedGraph, capture_ms: float
) -> SizeRecord:
    return SizeRecord(
        batch_size=size,
        num_tokens=size * buffers.capacity.tokens_per_request,
        num_nodes=graph.num_nodes,
        capture_ms=capture_ms,
        pool_bytes=graph.pool_bytes,
    )


@contextmanager
def _preserved(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put the declared state back, whatever happens."""
    saved = {name: tensor.clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        for name, tensor in state.items():
            tensor.copy_(saved[name])
