"""Changes of declared state that are not confined to reserved rows."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.audit.row_axes import RowAxis, RowsByKind, reserved_rows, row_axes, rows_of_batch
from graphkit.graphs import StateSnapshot


def changed_state(snapshot: StateSnapshot, batch: Any, page_size: int) -> list[str]:
    """Return the names of state tensors that differ from a snapshot outside of reserved rows.

    A tensor whose rows can be read in several ways differs if it does so in all of them.

    Args:
        snapshot: Copies of the tensors.
        batch: The batch that ran; its slots and requests bound the length of a dimension.
        page_size: Slots of a page; the first page is reserved.
    """
    rows = rows_of_batch(batch, page_size)
    return [
        name
        for name, tensor in snapshot.tensors.items()
        if _differs(tensor, snapshot.saved[name], rows, page_size)
    ]


def _differs(now: torch.Tensor, saved: torch.Tensor, rows: RowsByKind, page_size: int) -> bool:
    if torch.equal(now, saved):
        return False
    axes = row_axes(now, page_size, rows) or (RowAxis("batch", 0),)
    reserved = reserved_rows(page_size)
    return all(bool(axis.stray_rows(now, saved, reserved).any()) for axis in axes)
