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
        with backend.session():
            pass  # its end frees the pool, whose graphs are closed
    else:
        require_type("estimate", "record", record, CaptureRecord, "a graphkit.CaptureRecord")
        modes = [_find_mode(record, runner) for runner in runners]
    name = backend.name if record is None else record.backend
    model = GraphMemoryModel(modes, shares_pool=name != "recorder")
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

    The driver's memory of an executable depends on its nodes. The driver takes it in blocks that
    hold several executables, and the first one also takes what all share. So the other graphs have
    the mean bytes per node of all measured graphs but the first.

    Args:
        modes: Records of the graphs, in the order of their captures.
        shares_pool: Whether the graphs share a pool.
    """

    def __init__(self, modes: Sequence[ModeRecord], *, shares_pool: bool) -> None:
        self._shares_pool = shares_pool
        graphs = [graph for mode in modes for graph in _capture_order(mode)][1:]
        nodes = sum(graph.num_nodes for graph in graphs)
        self._bytes_per_node = sum(graph.executable_bytes for graph in graphs) / max(1, nodes)

    def predict(self, mode: ModeRecord, label: str, batch_sizes: Sequence[int]) -> ModeMemory:
        """Return the memory of a runner's graphs.

        Args:
            mode: Record of the sizes that were captured.
            label: Name of the runner.
            batch_sizes: Sizes to predict, ascending.
        """
        measured, wanted = tuple(size.batch_size for size in mode.sizes), list(batch_sizes)
        others = [size for size in wanted if size not in measured]
        pool = float(sum(loop.pool_bytes for loop in mode.loops))
        executables = float(sum(loop.executable_bytes for loop in mode.loops))
        for graphs in _by_body(mode):
            by_size = {graph.batch_size: graph for graph in graphs}
            pool += self._pool_bytes({n: float(g.pool_bytes) for n, g in by_size.items()}, wanted)
            executables += sum(by_size[n].executable_bytes for n in wanted if n in by_size)
            nodes = _interpolated_sum({n: float(g.num_nodes) for n, g in by_size.items()}, others)
            copies = 2 if isinstance(graphs[0], LoopBody) else 1  # a loop has its own
            executables += copies * nodes * self._bytes_per_node
        return ModeMemory(
            mode=label,
            batch_sizes=tuple(batch_sizes) if measured else (),
            measured_sizes=measured,
            pool_bytes=round(pool),
            executable_bytes=round(executables),
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


def _capture_order(mode: ModeRecord) -> Iterator[SizeRecord | LoopBody]:
    """Yield the graphs of a runner: loops are captured before the replays, large sizes first."""
    replays, *bodies = _by_body(mode) if mode.sizes else [()]
    for graphs in (*bodies, replays):
        yield from sorted(graphs, key=lambda graph: -graph.batch_size)


def _by_body(mode: ModeRecord) -> Iterator[Sequence[SizeRecord | LoopBody]]:
    """Yield the graphs of all sizes: first the replays, then each body of the loops."""
    if mode.sizes:
        yield mode.sizes
    for loop in mode.loops:
        bodies: dict[tuple[int | None, bool], list[LoopBody]] = {}
        for body in loop.bodies:
            bodies.setdefault((body.drafts, body.catches_up), []).append(body)
        yield from bodies.values()


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
