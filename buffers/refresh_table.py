"""What the refresh op is told of a runner's fields. Columns: ``graphkit.ops.refresh.Column``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.buffers.arena import Arena
from graphkit.buffers.layout import Capacity, FieldLayout
from graphkit.ops.refresh import CHUNK_BYTES, Column


def refresh_table(layouts: Sequence[FieldLayout], arena: Arena) -> torch.Tensor:
    """A row per segment, [segments, len(Column)] int64 on the CPU."""
    rows = []
    for layout in layouts:
        for i, segment in enumerate(arena.segments(layout)):
            row = [0] * len(Column)
            row[Column.ADDRESS] = segment.data_ptr()
            row[Column.PAYLOAD] = layout.payload + i * layout.segment_bytes
            row[Column.AXIS] = int(layout.axis_word)
            row[Column.ROW_BYTES] = layout.row_bytes
            row[Column.PAD] = _pad_pattern(layout)
            rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


def refresh_work(
    layouts: Sequence[FieldLayout], capacity: Capacity, batch_size: int
) -> torch.Tensor:
    """(segment, chunk) for each program of the CUDA kernel, [programs, 2] int32 on the CPU."""
    work = []
    for layout in layouts:
        size = capacity.rows(layout.field.axis, batch_size) * layout.row_bytes
        for segment in range(layout.first_segment, layout.first_segment + layout.segments):
            work += [(segment, chunk) for chunk in range(-(-size // CHUNK_BYTES))]
    return torch.tensor(work, dtype=torch.int32)


def _pad_pattern(layout: FieldLayout) -> int:
    """The pad value's bytes, repeated to eight, as one int64."""
    one = torch.tensor([layout.pad], dtype=layout.dtype)
    return int(one.repeat(8 // layout.dtype.itemsize).view(torch.int64))
