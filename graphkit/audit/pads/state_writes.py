"""Writes of a replay to declared state, judged by the rows that its batch may write.

``audit.row_axes`` lists every reading of a tensor's rows that its shape admits. A tensor is correct
if, in one of them, only rows of the batch and reserved rows changed. A tensor without such a
reading, such as a counter, is not judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from graphkit.audit.bits import first_difference_in_bits
from graphkit.audit.row_axes import RowAxis, RowsByKind, reserved_rows, row_axes, rows_of_batch
from graphkit.audit.stale_memory.pool_memory import tensor_range
from graphkit.graphs import StateSnapshot
from graphkit.records import distinct_text


@dataclass(frozen=True, slots=True)
class Write:
    """A row of state that a replay changed although it is not a row of its batch.

    Attributes:
        name: Name of the state tensor.
        before, after: First changed number of the row, before and after the replay.
    """

    name: str
    row: int
    before: str
    after: str


class WatchedState:
    """Declared state, compared with a snapshot of it.

    Args:
        start: The snapshot. A tensor that is part of another one is judged as part of that.
        page_size: Slots of a page; the first page is reserved.
        full_batch: The largest batch. Its slots and requests bound the length of a dimension.
        declared: Names of the tensors to judge; ``None`` judges all.
    """

    def __init__(
        self,
        start: StateSnapshot,
        page_size: int,
        full_batch: Any,
        declared: Collection[str] | None = None,
    ) -> None:
        self._page_size = page_size
        rows = rows_of_batch(full_batch, page_size)
        self._last_request = max(rows["requests"])
        # Arguments of a function have no slots or requests, so that its rows are not known.
        is_known = any(hasattr(full_batch, name) for name in ("out_cache_loc", "req_pool_indices"))
        self._watched = [
            _WatchedTensor(
                name,
                tensor,
                start.saved[name],
                row_axes(tensor, page_size, rows) if is_known else (),
            )
            for name, tensor in _without_parts(start.tensors)
            if declared is None or name in declared
        ]
        self._pools: list[tuple[_WatchedTensor, RowAxis]] = []
        self._tables: list[_WatchedTensor] = []

    def classify(self, batch: Any) -> None:
        """Find KV pools and request tables, after a replay of the batch.

        A pool was written at the batch's slots. A table has integers, a row per request, and was
        not written.
        """
        own, reserved = rows_of_batch(batch, self._page_size), reserved_rows(self._page_size)
        for watched in self._watched:
            pools = (axis for axis in watched.axes if watched.is_pool(axis, own, reserved))
            pool = next(pools, None)
            if pool is not None:
                self._pools.append((watched, pool))
                # Writes are judged by this axis first.
                watched.axes = (pool, *(axis for axis in watched.axes if axis != pool))
            elif watched.is_table(self._last_request):
                self._tables.append(watched)

    def poison(self, value: float) -> None:
        """Fill the reserved slots of KV pools of floating-point numbers."""
        for watched, axis in self._pools:
            if watched.tensor.is_floating_point():
                reserved = watched.tensor.narrow(axis.dim, 0, axis.reserved_count(self._page_size))
                # fill_ refuses values that a dtype lacks, such as infinity in eight bits.
                reserved.copy_(torch.tensor(value))

    def alias_reserved_row(self, batch: Any) -> bool:
        """Point the reserved row of request tables at the slots of a request outside the batch.

        Returns:
            Whether there is such a table and such a request.
        """
        requests = rows_of_batch(batch, self._page_size)["requests"]
        others = [row for row in range(1, self._last_request + 1) if row not in requests]
        for table in self._tables if others else ():
            table.tensor[0] = table.tensor[others[-1]]
        return bool(self._tables and others)

    def stray_write(self, batch: Any) -> Write | None:
        """Return the first changed row that is neither the batch's nor reserved."""
        allowed = rows_of_batch(batch, self._page_size)
        judged = [watched for watched in self._watched if watched.axes]
        # The first axis is nearly always the right one, so the device is waited for only once.
        is_stray = [watched.stray_rows(watched.axes[0], allowed).any() for watched in judged]
        suspect = torch.stack(is_stray).tolist() if is_stray else []
        writes = (watched.stray_write(allowed) for watched in compress(judged, suspect))
        return next(filter(None, writes), None)


class _WatchedTensor:
    """A state tensor, its copy, and the readings of its rows."""

    def __init__(
        self, name: str, tensor: torch.Tensor, saved: torch.Tensor, axes: tuple[RowAxis, ...]
    ) -> None:
        self.name, self.tensor, self.axes, self._saved = name, tensor, axes, saved

    def stray_rows(self, axis: RowAxis, allowed: RowsByKind) -> torch.Tensor:
        """Return which rows changed and are not allowed to, bool [rows]."""
        return axis.stray_rows(self.tensor, self._saved, allowed)

    def stray_write(self, allowed: RowsByKind) -> Write | None:
        """Return the first stray row along the axis that has the fewest, if no axis has none."""
        strays = [
            (axis, self.stray_rows(axis, allowed).nonzero().flatten().tolist())
            for axis in self.axes
        ]
        axis, rows = min(strays, key=lambda stray: len(stray[1]))
        return Write(self.name, rows[0], *self._values(axis, rows[0])) if rows else None

    def is_pool(self, axis: RowAxis, own: RowsByKind, reserved: RowsByKind) -> bool:
        """Return whether slots or pages of a batch changed, and nothing else."""
        if axis.kind not in ("slots", "pages"):
            return False
        rows = {*axis.changed_rows(self.tensor, self._saved).nonzero().flatten().tolist()}
        return rows <= {*own[axis.kind]} and not rows <= {*reserved[axis.kind]}

    def is_table(self, last_request: int) -> bool:
        """Return whether the tensor may hold a row of slots per request, and did not change."""
        tensor = self.tensor
        is_integer = tensor.dtype in (torch.int32, torch.int64) and tensor.ndim == 2
        return is_integer and len(tensor) > last_request and torch.equal(tensor, self._saved)

    def _values(self, axis: RowAxis, row: int) -> tuple[str, str]:
        """Return the first changed number of a row, before and after."""
        both = [axis.rows(tensor)[:, row].flatten() for tensor in (self._saved, self.tensor)]
        first = first_difference_in_bits(*both)
        assert first is not None, "the row has changed"
        return distinct_text(*(numbers[first].item() for numbers in both))


def _without_parts(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state without empty tensors and parts of other tensors, whose rows are shifted."""
    kept: dict[str, torch.Tensor] = {}
    containers_first = sorted(state.items(), key=lambda s: (-s[1].nbytes, not s[1].is_contiguous()))
    for name, tensor in containers_first:
        if tensor.numel() and not any(_is_part(tensor, whole) for whole in kept.values()):
            kept[name] = tensor
    return ((name, tensor) for name, tensor in state.items() if name in kept)


def _is_part(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    (begin, end), (first, last) = tensor_range(tensor), tensor_range(whole)
    return whole.is_contiguous() and first <= begin and end <= last
