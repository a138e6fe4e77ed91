"""Memory of runners: their tensors, and their graphs before these are captured."""

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
from graphkit.records import (
    CaptureRecord,
    LoopBody,
    MemoryEstimate,
    ModeMemory,
    ModeRecord,
    SizeRecord,
)
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
            bytes_per_node = 0.0
            if not all(map(_has_all_sizes, modes, runners)):
                bytes_per_node = backend.executable_bytes_per_node()
        with backend.session():
            pass  # its end frees the pool, whose graphs are closed
    else:
        require_type("estimate", "record", record, CaptureRecord, "a graphkit.CaptureRecord")
        modes = [_find_mode(record, runner) for runner in runners]
        bytes_per_node = mean_bytes_per_node(modes)
    name = backend.name if record is None else record.backend
    model = GraphMemoryModel(bytes_per_node, shares_pool=name != "recorder")
    graphs = tuple(
        model.predict(mode, runner.label, runner.table.sizes)
        for mode, runner in zip(modes, runners, strict=True)
    )
    parts = [*(runner.memory_parts() for runner in runners), *more]
    return MemoryEstimate(backend=name, graphs=graphs, **_part_bytes(parts, backend.device))


def trial_sizes(table: SizeTable) -> SizeTable:
    """Return the sizes of a table that predict the others: largest, middle and smallest."""
    sizes = table.sizes
    return table.subset(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}))


class GraphMemoryModel:
    """Memory of graphs of any sizes, from records of some.

    Graphs of CUDA share a pool, into which the largest size is captured first. The operations of
    the other sizes use its memory again, so that the pool does not grow in proportion to the number
    of sizes: it keeps the size that it has after the captures that were measured. Of these, the
    middle and the smallest size show what does not fit into the memory of the largest, such as
    blocks of up to 1 MiB, which torch's allocator keeps in segments of their own. If the largest
    size was not measured, the pool is proportional to it.

    Recorded graphs share no memory. The bytes of an operation's result are linear in the batch
    size, so the bytes of the other sizes are interpolated.

    The driver's memory of an executable is proportional to its nodes. The driver takes it in blocks
    of 2 MiB that hold several executables, and uses the memory of destroyed ones again, so that the
    growth during the captures of three sizes says little. ``bytes_per_node`` is measured on many
    executables, or is the mean of a record. Only where all sizes were captured, their own bytes
    count.

    Args:
        bytes_per_node: Bytes of the driver per node of an executable.
        shares_pool: Whether the graphs share a pool.
    """

    def __init__(self, bytes_per_node: float, *, shares_pool: bool) -> None:
        self._bytes_per_node, self._shares_pool = bytes_per_node, shares_pool

    def predict(self, mode: ModeRecord, label: str, batch_sizes: Sequence[int]) -> ModeMemory:
        """Return the memory of a runner's graphs."""
        measured, wanted = tuple(size.batch_size for size in mode.sizes), list(batch_sizes)
        pool = float(sum(loop.pool_bytes for loop in mode.loops))
        executables = sum(loop.executable_bytes for loop in mode.loops)
        nodes = float(sum(loop.prologue_nodes for loop in mode.loops))
        for graphs in _by_body(mode):
            by_size = {graph.batch_size: graph for graph in graphs}
            pool += self._pool_bytes({n: float(g.pool_bytes) for n, g in by_size.items()}, wanted)
            executables += sum(by_size[n].executable_bytes for n in wanted if n in by_size)
            copies = 2 if isinstance(graphs[0], LoopBody) else 1  # a loop has its own
            nodes += copies * _interpolated_sum(
                {n: float(g.num_nodes) for n, g in by_size.items()}, wanted
            )
        if not set(wanted).issubset(measured):
            executables = round(nodes * self._bytes_per_node)
        return ModeMemory(
            mode=label,
            batch_sizes=tuple(batch_sizes) if measured else (),
            measured_sizes=measured,
            pool_bytes=round(pool),
            executable_bytes=executables,
        )

    def _pool_bytes(self, measured: dict[int, float], wanted: Sequence[int]) -> float:
        if not self._shares_pool:
            return _interpolated_sum(measured, wanted)
        largest = max(measured)
        smaller = sum(measured.values()) - measured[largest] if len(wanted) > 1 else 0.0
        return measured[largest] * wanted[-1] / largest + smaller


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


def _interpolated_sum(measured: dict[int, float], sizes: Sequence[int]) -> float:
    """Return the sum of a measured value at some sizes, interpolated."""
    if not sizes:
        return 0.0
    values = [measured[size] for size in sorted(measured)]
    return float(interpolated(sorted(measured), values, max(sizes))[list(sizes)].sum())


def mean_bytes_per_node(modes: Sequence[ModeRecord]) -> float:
    """Return the driver's memory of all recorded executables per node."""
    graphs = [graph for mode in modes for body in _by_body(mode) for graph in body]
    loops = [loop for mode in modes for loop in mode.loops]
    nodes = sum(graph.num_nodes for graph in graphs)
    for loop in loops:
        nodes += loop.prologue_nodes + sum(body.num_nodes for body in loop.bodies)
    return sum(made.executable_bytes for made in (*graphs, *loops)) / max(1, nodes)


def _has_all_sizes(mode: ModeRecord, runner: _Runner) -> bool:
    return len(mode.sizes) in (0, len(runner.table.sizes))


def _by_body(mode: ModeRecord) -> Iterator[Sequence[SizeRecord | LoopBody]]:
    """Yield the graphs of all sizes: first the replays, then each body of the loops."""
    if mode.sizes:
        yield mode.sizes
    for loop in mode.loops:
        bodies: dict[tuple[int | None, int | None, bool], list[LoopBody]] = {}
        for body in loop.bodies:
            rows = None if body.rows is None else body.rows // body.batch_size  # of a request
            bodies.setdefault((body.drafts, rows, body.catches_up), []).append(body)
        yield from bodies.values()


def _find_mode(record: CaptureRecord, runner: _Runner) -> ModeRecord:
    for mode in record.modes:
        is_same = mode.mode == runner.mode.name
        if is_same and mode.tokens_per_request == runner.tokens_per_request and mode.sizes:
            return mode
    known = ", ".join(f"{m.mode} of width {m.tokens_per_request}" for m in record.modes if m.sizes)
    raise RecordError(
        f"the record has no graphs of {runner.mode.name} of width {runner.tokens_per_request}; it "
        f"has {known or 'none'}. Pass a record of the same model and settings, or no record."
    )


def _part_bytes(parts: Sequence[MemoryParts], device: torch.device) -> dict[str, int]:
    """Return the bytes of each part on the device; each storage counts once."""
    counted: set[int] = set()
    totals = dict.fromkeys(_PARTS, 0)
    for part in _PARTS:
        for tensor in (tensor for tensors in parts for tensor in tensors.get(part, ())):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                totals[part] += storage.nbytes()
    return totals
