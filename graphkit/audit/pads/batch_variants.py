"""Variations of a batch, made from what its fields declare: other pads, another order.

A field either says where the rows of its request are and where they write, which is structure, or a
row is computed from it, which is content. What stands in the content of a pad row must not matter
to live rows; its structure keeps it out of their way, and is never varied.
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
from graphkit.config import BufferSizes

_OWN_ROW = "select_index"
"""Numbers of this field are rows of the very batch that they stand in."""
_DESTINATION = "out_cache_loc"
TOKEN_IDS = ("input_ids", "topk_index")
_POSITIONS = ("positions", "mrope_positions")


Fill = Callable[[FieldLayout, torch.Tensor], Any]
"""What to write into the content of rows, given a field and its rows; ``None`` changes nothing."""


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch taken apart, so that its requests can be picked, put in order, and padded.

    Attributes:
        inputs: The class of the batch.
        layouts: The fields that it brings.
        capacity: Their runner's.
        counts: Rows of each request, int64 [B].
        rows: Every field, rows first; ``select_index`` counts from its request's first row.
    """

    inputs: type[Inputs]
    layouts: tuple[FieldLayout, ...]
    capacity: Capacity
    counts: torch.Tensor
    rows: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, batch: Any, layouts: Sequence[FieldLayout], capacity: Capacity) -> Requests:
        """Take a batch apart. Its arrays become tensors of their fields' dtypes."""
        present = tuple(each for each in layouts if getattr(batch, each.name) is not None)
        rows = {each.name: _rows_first(each, getattr(batch, each.name)) for each in present}
        counts = _counts(type(batch), rows, capacity, batch.batch_size)
        return cls(type(batch), present, capacity, counts, _moved(rows, -_starts(counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self) -> Any:
        """Put the batch together."""
        rows = _moved(self.rows, _starts(self.counts))
        values: dict[str, Any] = {
            each.name: _laid_out(each, rows[each.name]) for each in self.layouts
        }
        return self.inputs(**values)

    def padded(self, size: int, fill: Fill = lambda _layout, _rows: None) -> Any:
        """A batch of ``size`` live requests: these, and behind them what a refresh would write.

        Args:
            size: At least as many requests as there are.
            fill: Changes the content of the pads.
        """
        return self._join(self._pads(size - len(self)).filled(fill)).batch()

    def take(self, order: Sequence[int]) -> Requests:
        """Some of the requests, in this order."""
        chosen = torch.tensor(order, dtype=torch.int64)
        owner = torch.arange(len(self)).repeat_interleave(self.counts)
        tokens = torch.cat([(owner == request).nonzero()[:, 0] for request in order])
        index = {Axis.REQUEST: chosen, Axis.TOKEN: tokens}

        def pick(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            axis = layout.field.axis
            return rows if axis is Axis.NONE else rows[index[axis].to(rows.device)]

        return replace(self._each(pick), counts=self.counts[chosen])

    def _pads(self, number: int) -> Requests:
        capacity = self.capacity
        counts = torch.full((number,), 1 if capacity.ragged else capacity.tokens_per_request)
        tokens = int(counts.sum())
        rows = {
            each.name: torch.full(
                (capacity.rows(each.field.axis, number, tokens), *_row_shape(each)),
                each.pad,
                dtype=each.dtype,
            )
            for each in self.layouts
        }
        return replace(self, counts=counts, rows=rows)

    def filled(self, fill: Fill) -> Requests:
        """The same requests with other contents."""

        def filled(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            value = fill(layout, rows) if is_content(layout) else None
            if value is None:
                return rows
            return torch.as_tensor(value, dtype=rows.dtype).to(rows.device).expand_as(rows)

        return self._each(filled)

    def _join(self, others: Requests) -> Requests:
        """What belongs to no row stays these' own."""

        def joined(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
            if layout.field.axis is Axis.NONE:
                return rows
            return torch.cat([rows, others.rows[layout.name].to(rows.device)])

        return replace(self._each(joined), counts=torch.cat([self.counts, others.counts]))

    def _each(self, change: Callable[[FieldLayout, torch.Tensor], torch.Tensor]) -> Requests:
        rows = {each.name: change(each, self.rows[each.name]) for each in self.layouts}
        return replace(self, rows=rows)


def is_content(layout: FieldLayout) -> bool:
    """Whether a row is computed from the field; whole numbers per request are structure."""
    field = layout.field
    is_number = not field.row and not layout.dtype.is_floating_point
    return not (
        field.axis is Axis.NONE
        or field.name == _DESTINATION
        or (field.axis is Axis.REQUEST and is_number)
    )


def largest_number(layout: FieldLayout, sizes: BufferSizes, steps_ahead: int = 0) -> int | None:
    """The largest whole number that a field of the library may hold; ``None`` if unknown.

    Args:
        layout: The field's.
        sizes: The runner's.
        steps_ahead: The runner's, see ``Runner.steps_ahead``.
    """
    if layout.name in TOKEN_IDS:  # a reduced vocabulary of drafts is part of the target's
        return (sizes.draft_vocab_size or sizes.vocab_size) - 1
    return sizes.max_context_len - 1 - steps_ahead if layout.name in _POSITIONS else None


def worst_of(value: float) -> Callable[[FieldLayout, torch.Tensor], Any]:
    """Fills floats with a value such as NaN, and masks so that nothing is seen."""

    def fill(layout: FieldLayout, rows: torch.Tensor) -> Any:
        if layout.dtype is torch.bool:
            return False
        return value if rows.is_floating_point() else None

    return fill


def _counts(
    inputs: type[Inputs], rows: Mapping[str, torch.Tensor], capacity: Capacity, requests: int
) -> torch.Tensor:
    found = None
    if capacity.ragged:
        found = inputs.row_counts(SimpleNamespace(**{k: each.cpu() for k, each in rows.items()}))
    if found is None:
        return torch.full((requests,), capacity.tokens_per_request)
    return torch.from_numpy(found)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _moved(rows: Mapping[str, torch.Tensor], by: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: each + by.to(each) if name == _OWN_ROW else each for name, each in rows.items()}


def _row_shape(layout: FieldLayout) -> tuple[int, ...]:
    row = (math.prod(layout.row),) if layout.field.flat else layout.row
    return (layout.field.lead, *row) if layout.field.lead else row


def _rows_first(layout: FieldLayout, value: Any) -> torch.Tensor:
    # A copy of what is not a tensor: torch warns of memory that is read-only.
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    shape = _row_shape(layout)
    if layout.field.lead:
        return tensor.to(layout.dtype).reshape(shape[0], -1, *shape[1:]).movedim(1, 0)
    return tensor.to(layout.dtype).reshape(-1, *shape)


def _laid_out(layout: FieldLayout, rows: torch.Tensor) -> torch.Tensor:
    field = layout.field
    rows = rows.movedim(0, 1) if field.lead else rows
    return (rows.flatten(1 if field.lead else 0) if field.flat else rows).contiguous()
