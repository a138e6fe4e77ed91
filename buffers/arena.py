"""Device memory of a runner's fields, and the tables that describe it to the refresh op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphkit.buffers.layout import Capacity, FieldLayout, header_bytes
from graphkit.errors import ConfigError
from graphkit.ops.refresh import CHUNK_BYTES, Column

_ALIGNMENT = 256  # lets the refresh kernel copy sixteen bytes at a time


class Arena:
    """Memory of every field at full capacity, filled with its pad value.

    Attributes:
        tensors: Rows of each field, ``layout.shape(layout.capacity)``, by name.
        nbytes: Allocated bytes, without bound fields.

    Raises:
        ConfigError: A bound tensor has the wrong shape, dtype, device or strides.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        bound: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        owned = [layout for layout in layouts if layout.name not in bound]
        sizes = [-(-layout.total_bytes // _ALIGNMENT) * _ALIGNMENT for layout in owned]
        self.nbytes = sum(sizes)
        memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self.tensors: dict[str, torch.Tensor] = {}
        for layout, part in zip(owned, memory.split(sizes), strict=True):
            rows = part[: layout.total_bytes].view(layout.dtype)
            self.tensors[layout.name] = rows.view(layout.shape(layout.capacity)).fill_(layout.pad)
        for layout in layouts:
            if layout.name in bound:
                self.tensors[layout.name] = _checked(layout, bound[layout.name], device)

    def segments(self, layout: FieldLayout) -> list[torch.Tensor]:
        """Return the runs of consecutive rows of a field."""
        tensor = self.tensors[layout.name]
        return list(tensor) if layout.field.lead else [tensor]


def _checked(layout: FieldLayout, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"bound_fields[{layout.name!r}] is a {type(tensor).__name__}. Pass a tensor.",
            field="bound_fields",
        )
    came = (tuple(tensor.shape), tensor.dtype, tensor.device)
    shape = layout.shape(layout.capacity)
    if came != (shape, layout.dtype, device) or not tensor.is_contiguous():
        raise ConfigError(
            f"bound_fields[{layout.name!r}] is {came[0]} {came[1]} on {came[2]}. "
            f"Pass a contiguous {shape} {layout.dtype} on {device}.",
            field="bound_fields",
        )
    return tensor


def refresh_table(layouts: Sequence[FieldLayout], arena: Arena) -> torch.Tensor:
    """Return one row per segment, [segments, len(Column)] int64 on the CPU."""
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


def refresh_copies(
    layouts: Sequence[FieldLayout], capacity: Capacity, batch_size: int
) -> torch.Tensor:
    """Return the (segment, chunk) pairs that a size fills, [programs, 2] int32 on the CPU."""
    copies = []
    for layout in layouts:
        size = capacity.rows(layout.field.axis, batch_size) * layout.row_bytes
        for segment in range(layout.first_segment, layout.first_segment + layout.segments):
            copies += [(segment, chunk) for chunk in range(-(-size // CHUNK_BYTES))]
    return torch.tensor(copies, dtype=torch.int32)


def refresh_fetches(
    layouts: Sequence[FieldLayout], capacity: Capacity, batch_size: int
) -> torch.Tensor:
    """Return (first byte, bytes) of the entry's parts that a size needs, [programs, 2] int32."""
    parts = [(0, header_bytes(layouts))]
    for layout in layouts:
        if not layout.field.by_address:
            size = capacity.rows(layout.field.axis, batch_size) * layout.row_bytes
            begins = (layout.payload + i * layout.segment_bytes for i in range(layout.segments))
            parts += [(begin, size) for begin in begins]
    return torch.tensor([chunk for part in parts for chunk in _chunks(*part)], dtype=torch.int32)


def _chunks(first: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield parts of at most CHUNK_BYTES that cover the bytes, in whole words."""
    begin, end = first // 8 * 8, -(-(first + size) // 8) * 8
    for at in range(begin, end, CHUNK_BYTES):
        yield at, min(CHUNK_BYTES, end - at)


def _pad_pattern(layout: FieldLayout) -> int:
    """Return the pad value's bytes, repeated to eight, as one int64."""
    one = torch.tensor([layout.pad], dtype=layout.dtype)
    return int(one.repeat(8 // layout.dtype.itemsize).view(torch.int64))
