"""Derive variants of a batch from its declared fields: other pad rows, other orders of requests.

A field is structure or content. Structure says where the rows of a request are and where they
write; it keeps pad rows away from live rows and is never varied. Content is what a row is computed
from; the content of a pad row must not affect live rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from graphkit.buffers import Axis, Capacity, FieldLayout, Inputs

_ROW_INDEX = "select_index"
"""Holds row indices of its own batch."""
_DESTINATION = "out_cache_loc"

Fill = Callable[[FieldLayout, torch.Tensor], Any]
"""Returns new content for the rows of a field; ``None`` keeps it."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a batch, to select, reorder and pad them.

    Attributes:
        layouts: Fields that the batch has.
        counts: Rows of each request, int64 [B].
        rows: Each field with rows first; ``select_index`` counts from its request's first row.
    """

    inputs: type[Inputs]
    layouts: tuple[FieldLayout, ...]
    capacity: Capacity
    counts: torch.Tensor
    rows: Mapping[str, torch.Tensor]

    @classmethod
    def from_batch(cls, batch: Any, layouts: Sequence[FieldLayout], capacity: Capacity) -> Requests:
        """Return the requests of a batch; arrays become tensors of their fields' dtypes."""
        present = tuple(layout for layout in layouts if getattr(batch, layout.name) is not None)
        rows = {layout.name: _rows_first(layout, getattr(batch, layout.name)) for layout in present}
        counts = _row_counts(type(batch), rows, capacity, batch.batch_size)
        return cls(type(batch), present, capacity, counts, _shifted(rows, -_starts(counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self) -> Any:
        """Return the requests as a batch."""
        rows = _shifted(self.rows, _starts(self.counts))
        values: dict[str, Any] = {
            layout.name: _as_field(layout, rows[layout.name]) for layout in self.layouts
        }
        return self.inputs(**values)

    def padded(self, size: int, fill: Fill = lambda _layout, _rows: None) -> Any:
        """Return a batch of ``size`` live requests: these, then the pads that a refresh writes."""
        pads = self._pads(size - len(self)).filled(fill)

        def joined(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            if layout.field.axis is Axis.NONE:
                return rows
            return torch.cat([rows, pads.rows[layout.name].to(rows.device)])

        counts = torch.cat([self.counts, pads.counts])
        return replace(self._map_rows(joined), counts=counts).batch()

    def take(self, order: Sequence[int]) -> Requests:
        """Return the requests of these indices, in this order."""
        chosen = torch.tensor(order, dtype=torch.int64)
        index = {Axis.REQUEST: chosen, Axis.TOKEN: self.token_rows(order)}

        def taken(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            axis = layout.field.axis
            return rows if axis is Axis.NONE else rows[index[axis].to(rows.device)]

        return replace(self._map_rows(taken), counts=self.counts[chosen])

    def token_rows(self, order: Sequence[int]) -> torch.Tensor:
        """Return the token rows of requests, in the order of these, int64 [T]."""
        owner = torch.arange(len(self)).repeat_interleave(self.counts)
        return torch.cat([(owner == request).nonzero()[:, 0] for request in order])

    def filled(self, fill: Fill) -> Requests:
        """Return the requests with other content."""

        def filled(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            value = fill(layout, rows) if is_content(layout) else None
            if value is None:
                return rows
            return torch.as_tensor(value, dtype=rows.dtype).to(rows.device).expand_as(rows)

        return self._map_rows(filled)

    def _pads(self, number: int) -> Requests:
        capacity = self.capacity
        counts = torch.full((number,), 1 if capacity.ragged else capacity.tokens_per_request)
        tokens = int(counts.sum())
        rows = {
            layout.name: torch.full(
                (capacity.rows(layout.field.axis, number, tokens), *_row_shape(layout)),
                layout.pad,
                dtype=layout.dtype,
            )
            for layout in self.layouts
        }
        return replace(self, counts=counts, rows=rows)

    def _map_rows(self, change: Callable[[FieldLayout, torch.Tensor], torch.Tensor]) -> Requests:
        rows = {layout.name: change(layout, self.rows[layout.name]) for layout in self.layouts}
        return replace(self, rows=rows)


def is_content(layout: FieldLayout) -> bool:
    """Return whether a field is content. Integers per request are structure."""
    field = layout.field
    is_integer = not field.row and not layout.dtype.is_floating_point
    return not (
        field.axis is Axis.NONE
        or field.name == _DESTINATION
        or (field.axis is Axis.REQUEST and is_integer)
    )


def fill_floats(value: float) -> Fill:
    """Return a fill of floats with a value such as NaN, and of masks with False."""

    def fill(layout: FieldLayout, rows: torch.Tensor) -> Any:
        if layout.dtype is torch.bool:
            return False
        return value if rows.is_floating_point() else None

    return fill


def _row_counts(
    inputs: type[Inputs], rows: Mapping[str, torch.Tensor], capacity: Capacity, requests: int
) -> torch.Tensor:
    counts = None
    if capacity.ragged:
        counts = inputs.row_counts(
            SimpleNamespace(**{k: values.cpu() for k, values in rows.items()})
        )
    if counts is None:
        return torch.full((requests,), capacity.tokens_per_request)
    return torch.from_numpy(counts)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _shifted(rows: Mapping[str, torch.Tensor], by: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the fields with an offset for each request added to row indices."""
    return {
        name: values + by.to(values) if name == _ROW_INDEX else values
        for name, values in rows.items()
    }


def _row_shape(layout: FieldLayout) -> tuple[int, ...]:
    row = (math.prod(layout.row),) if layout.field.flat else layout.row
    return (layout.field.lead, *row) if layout.field.lead else row


def _rows_first(layout: FieldLayout, value: Any) -> torch.Tensor:
    # np.array copies: torch warns of read-only memory.
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    shape = _row_shape(layout)
    if layout.field.lead:
        return tensor.to(layout.dtype).reshape(shape[0], -1, *shape[1:]).movedim(1, 0)
    return tensor.to(layout.dtype).reshape(-1, *shape)


def _as_field(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows in the shape of their field."""
    field = layout.field
    rows = rows.movedim(0, 1) if field.lead else rows
    return (rows.flatten(1 if field.lead else 0) if field.flat else rows).contiguous()
