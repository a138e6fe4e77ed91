"""Memory of runners: that of their tensors, and that of graphs that are not captured yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.config import require_type
from graphkit.errors import RecordError
from graphkit.graphs import Backend, SizeTable
from graphkit.records import CaptureRecord, LoopRecord, MemoryEstimate, ModeMemory, ModeRecord
from graphkit.spec import ForwardMode

MemoryParts = Mapping[str, Iterable[torch.Tensor]]
"""Tensors by the attribute of ``MemoryEstimate`` that counts them."""
_PARTS = "kv", "recurrent_state", "workspace", "static_buffers"
"""A tensor counts in the first part that has it: backends hold their pools, too."""


class _Runner(Protocol):
    """What an estimate reads of a ``Runner``."""

    mode: ClassVar[ForwardMode]
    table: SizeTable
    tokens_per_request: int

    @property
    def label(self) -> str: ...

    def trial_capture(self) -> AbstractContextManager[ModeRecord]: ...

    def memory_parts(self) -> MemoryParts: ...


def estimate_memory(
    backend: Backend,
    runners: Sequence[_Runner],
    record: CaptureRecord | None = None,
    more: Iterable[MemoryParts] = (),
) -> MemoryEstimate:
    """Return the memory of runners, in the order in which they capture.

    Args:
        backend: Backend of the runners.
        runners: The runners.
        record: Record of a capture to predict from; ``None`` captures a few sizes of each runner,
            and closes them when all are captured.
        more: Further tensors.

    Raises:
        CaptureError: A size cannot be captured.
        RecordError: ``record`` has no size of a runner.
    """
    if record is None:
        with ExitStack() as trials:
            modes = [trials.enter_context(runner.trial_capture()) for runner in runners]
        with backend.session():
            pass  # its end frees the pool, whose graphs are closed
    else:
        require_type("estimate", "record", record, CaptureRecord, "a graphkit.CaptureRecord")
        modes = [_find_mode(record, runner) for runner in runners]
    name = backend.name if record is None else record.backend
    graphs = tuple(
        graph_memory(mode, runner.label, runner.table.sizes, shares_pool=name != "recorder")
        for mode, runner in zip(modes, runners, strict=True)
    )
    parts = [*(runner.memory_parts() for runner in runners), *more]
    return MemoryEstimate(backend=name, graphs=graphs, **_part_bytes(parts, backend.device))


def trial_sizes(table: SizeTable) -> SizeTable:
    """Return the sizes of a table that predict the others: largest, middle and smallest."""
    sizes = table.sizes
    return table.subset(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}))


def graph_memory(
    mode: ModeRecord, label: str, batch_sizes: Sequence[int], *, shares_pool: bool
) -> ModeMemory:
    """Return the memory of graphs of some sizes, from a record of others.

    Graphs of CUDA share a pool, into which the largest size is captured first. The operations of
    the other sizes use its memory again, so that the pool does not grow in proportion to the number
    of sizes: it keeps the size that it has after the captures that were measured. Of these, the
    middle and the smallest size show what does not fit into the memory of the largest, such as
    blocks of up to 1 MiB, which torch's allocator keeps in segments of their own. If the largest
    size was not measured, the pool is proportional to it.

    Recorded graphs share no memory. The bytes of an operation's result are linear in the batch
    size, so the bytes of the other sizes are interpolated.

    The driver's memory of an executable depends on its nodes. It is interpolated, too.

    Args:
        mode: Record of the sizes that were captured.
        label: Name of the runner.
        batch_sizes: Sizes to predict, ascending.
        shares_pool: Whether the graphs share a pool.
    """
    measured, wanted = tuple(size.batch_size for size in mode.sizes), list(batch_sizes)
    pool = executables = 0.0
    for points in _graphs_by_size(mode):
        sizes = sorted(points)
        pools, executable = ([points[size][i] for size in sizes] for i in (0, 1))
        executables += float(interpolated(sizes, executable, wanted[-1])[wanted].sum())
        if shares_pool:
            smaller = sum(pools[:-1]) if len(wanted) > 1 else 0
            pool += pools[-1] * wanted[-1] / sizes[-1] + smaller
        else:
            pool += float(interpolated(sizes, pools, wanted[-1])[wanted].sum())
    for loop in mode.loops:
        pool += loop.pool_bytes
        executables += loop.executable_bytes * len(batch_sizes) / len(measured)
    return ModeMemory(
        mode=label,
        batch_sizes=tuple(batch_sizes) if measured else (),
        measured_sizes=measured,
        pool_bytes=round(pool),
        executable_bytes=round(executables),
    )


def interpolated(
    sizes: Sequence[int], values: Sequence[float], largest: int
) -> NDArray[np.float64]:
    """Interpolate the values of ascending sizes for 0 to ``largest``; none becomes negative.

    Below the smallest size, the values are equal to its value. Above the largest, they continue as
    between the two largest, and do not decrease.
    """
    all_sizes = np.arange(largest + 1, dtype=np.float64)
    curve = np.interp(all_sizes, sizes, values)
    if len(sizes) > 1:
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        above = all_sizes > sizes[-1]
        curve[above] = values[-1] + max(slope, 0.0) * (all_sizes[above] - sizes[-1])
    return np.maximum(curve, 0.0)


def _graphs_by_size(mode: ModeRecord) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield pool and executable bytes by size: of the replays, then of each body of the loops."""
    if mode.sizes:
        yield {s.batch_size: (s.pool_bytes, s.executable_bytes) for s in mode.sizes}
    for loop in mode.loops:
        yield from _bodies_by_size(loop)


def _bodies_by_size(loop: LoopRecord) -> Iterable[dict[int, tuple[int, int]]]:
    bodies: dict[tuple[int | None, bool], dict[int, tuple[int, int]]] = {}
    for body in loop.bodies:
        points = bodies.setdefault((body.drafts, body.catches_up), {})
        points[body.batch_size] = body.pool_bytes, body.executable_bytes
    return bodies.values()


def _find_mode(record: CaptureRecord, runner: _Runner) -> ModeRecord:
    for mode in record.modes:
        is_same = mode.mode == runner.mode.name
        if is_same and mode.tokens_per_request == runner.tokens_per_request and mode.sizes:
            return mode
    found = ", ".join(f"{m.mode} of width {m.tokens_per_request}" for m in record.modes if m.sizes)
    raise RecordError(
        f"the record has no graphs of {runner.mode.name} of width {runner.tokens_per_request}; it "
        f"has {found or 'none'}. Pass a record of the same model and settings, or no record."
    )


def _part_bytes(parts: Sequence[MemoryParts], device: torch.device) -> dict[str, int]:
    """Return the bytes of each part on the device; each storage counts once."""
    counted: set[int] = set()
    found = dict.fromkeys(_PARTS, 0)
    for part in _PARTS:
        for tensor in (tensor for tensors in parts for tensor in tensors.get(part, ())):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                found[part] += storage.nbytes()
    return found
