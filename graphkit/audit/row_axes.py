"""Find the dimension of a state tensor whose rows a batch may write.

A target declares state without its layout. A row may be a slot, a page of slots, a request or an
index in the batch, and dimensions for layers or for keys and values may precede it. ``row_axes``
lists every reading that a tensor's shape admits; a write is correct if one of them explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from graphkit.graphs import StateSnapshot

RowKind = Literal["slots", "pages", "requests", "batch"]
RowsByKind = Mapping[RowKind, Sequence[int]]
"""Row indices for each reading of a tensor's rows."""
_MAX_LEADING_DIMS = 2
"""Dimensions that may precede the rows: layers, and keys and values."""


@dataclass(frozen=True, slots=True)
class RowAxis:
    """A dimension of a state tensor, read as its rows.

    Attributes:
        kind: What one row belongs to.
        dim: Index of the dimension.
        num_dims: 2 if slots are split into pages and slots of a page, else 1.
    """

    kind: RowKind
    dim: int
    num_dims: int = 1

    def reserved_count(self, page_size: int) -> int:
        """Return how many leading entries of the dimension are reserved for pad rows."""
        if self.kind == "batch":
            return 0
        return page_size if (self.kind, self.num_dims) == ("slots", 1) else 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as [leading, rows, numbers of a row], contiguous."""
        shape, end = tensor.shape or (1,), self.dim + self.num_dims
        count = prod(shape[self.dim : end])
        return tensor.reshape(prod(shape[: self.dim]), count, -1).contiguous()

    def changed_rows(self, now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return which rows differ in any bit, bool [rows]."""
        return (_as_integers(self.rows(now)) != _as_integers(self.rows(before))).any(2).any(0)

    def stray_rows(
        self, now: torch.Tensor, before: torch.Tensor, allowed: RowsByKind
    ) -> torch.Tensor:
        """Return which rows differ and are not allowed to, bool [rows].

        Enqueues without waiting for the device. Allowed indices beyond the last row are ignored.
        """
        changed = self.changed_rows(now, before)
        # Indices beyond the end go to one extra row; a boolean mask would wait for the device.
        rows = torch.cat([changed, changed.new_zeros(1)])
        indices = torch.tensor(allowed[self.kind], dtype=torch.int64).to(rows.device)
        rows[indices.clamp(max=len(changed))] = False
        return rows[:-1]


def reserved_rows(page_size: int) -> RowsByKind:
    """Return the rows reserved for pads: the first page of slots, and request row 0."""
    return {"slots": range(page_size), "pages": [0], "requests": [0], "batch": []}


def rows_of_batch(batch: Any, page_size: int) -> RowsByKind:
    """Return the rows that a replay of a batch may write: its own and the reserved ones."""
    slots, requests = _to_list(batch, "out_cache_loc"), _to_list(batch, "req_pool_indices")
    return {
        "slots": [*range(page_size), *slots],
        "pages": [0, *(slot // page_size for slot in slots)],
        "requests": [0, *requests],
        "batch": range(batch.batch_size),
    }


def _to_list(batch: Any, field: str) -> list[int]:
    """Return the indices of a field; empty if it is bound, or the step does not declare it."""
    values = getattr(batch, field, None)
    return [] if values is None else values.tolist()


def row_axes(tensor: torch.Tensor, page_size: int, rows: RowsByKind) -> tuple[RowAxis, ...]:
    """Return every reading of a tensor's rows that its shape admits, most probable first.

    ``rows`` exist: a dimension must be longer than the largest index.
    """
    largest = {kind: max(indices, default=0) for kind, indices in rows.items()}
    kinds = list(largest)
    axes = _axes_of_shape(tensor.shape, page_size, largest)
    # The dimension of slots is longer than the dimensions that precede it.
    return tuple(sorted(axes, key=lambda axis: (kinds.index(axis.kind), -tensor.shape[axis.dim])))


def without_reserved_rows(tensor: torch.Tensor, page_size: int, rows: RowsByKind) -> torch.Tensor:
    """Return a view without the reserved rows of the most probable reading."""
    for axis in row_axes(tensor, page_size, rows)[:1]:
        first = axis.reserved_count(page_size)
        return tensor.narrow(axis.dim, first, tensor.shape[axis.dim] - first)
    return tensor


def changed_state(snapshot: StateSnapshot, batch: Any, page_size: int) -> list[str]:
    """Return the names of state tensors that differ from a snapshot outside of reserved rows.

    A tensor whose rows can be read in several ways differs if it does so in all of them.
    """
    rows = rows_of_batch(batch, page_size)
    return [
        name
        for name, tensor in snapshot.tensors.items()
        if _differs(tensor, snapshot.saved[name], rows, page_size)
    ]


def _axes_of_shape(
    shape: Sequence[int], page_size: int, largest: Mapping[RowKind, int]
) -> Iterator[RowAxis]:
    # The last of several dimensions is the content of a row.
    for dim, length in enumerate(shape[: max(len(shape) - 1, 1)][: _MAX_LEADING_DIMS + 1]):
        if length > largest["slots"]:
            yield RowAxis("slots", dim)
        if page_size > 1 and length > largest["pages"]:
            is_split = shape[dim + 1 : dim + 2] == (page_size,)
            yield RowAxis("slots", dim, 2) if is_split else RowAxis("pages", dim)
        if length > largest["requests"]:
            yield RowAxis("requests", dim)
        if dim == 0 and length > largest["batch"]:
            yield RowAxis("batch", dim)


def _as_integers(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of rows as int64 where their length allows it: NaN then equals itself."""
    data = rows.view(torch.uint8)
    is_aligned = data.shape[2] % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if is_aligned else data


def _differs(now: torch.Tensor, saved: torch.Tensor, rows: RowsByKind, page_size: int) -> bool:
    if torch.equal(now, saved):
        return False
    axes = row_axes(now, page_size, rows) or (RowAxis("batch", 0),)
    reserved = reserved_rows(page_size)
    return all(bool(axis.stray_rows(now, saved, reserved).any()) for axis in axes)
