"""Writers of a batch's live rows into a mailbox entry: the innermost loop of a replay on the host.

The fast paths compare types, dtypes and shapes by identity or equality, and copy. All other values
go through ``validate_field``, which casts or refuses them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.layout import Axis, FieldLayout
from graphkit.buffers.mailbox import Mailbox
from graphkit.buffers.validation import validate_field, wrong_count
from graphkit.errors import InputError
from graphkit.ops.refresh import FROM_PAYLOAD, Header

_Array, _Tensor = np.ndarray, torch.Tensor
# ctypes.memmove releases the GIL, which costs more than a small copy.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class FieldWriter:
    """Writes live rows of one field into one entry, always the same number.

    Attributes:
        name: The field.
        shape: Its shape with that many rows.
        dtype: Its dtype.
        size: Bytes of one segment with that many rows.
        rows: View of the entry as numpy; ``None`` if the field has no payload or numpy lacks the
            dtype.
        address: Start of the payload; 0 if the field has none, or has several segments.
        fast_path: Values that ``BatchWriter.write`` needs; unpacking costs less than attribute
            access.
    """

    __slots__ = (
        "_device",
        "_device_index",
        "_mailbox",
        "_place",
        "_point",
        "_row_count",
        "_segments",
        "address",
        "dtype",
        "fast_path",
        "layout",
        "name",
        "rows",
        "shape",
        "size",
    )  # fmt: skip

    def __init__(
        self,
        mailbox: Mailbox,
        entry: int,
        layout: FieldLayout,
        row_count: int,
        device: torch.device,
    ) -> None:
        self.name, self.shape = layout.name, layout.shape(row_count)
        self.layout, self._mailbox = layout, mailbox
        self._row_count, self._device = row_count, device
        self._device_index = -1 if device.type == "cpu" else device.index
        self.dtype, self.size = layout.dtype, row_count * layout.row_bytes
        first = int(Header.SOURCES) + layout.first_segment
        self._segments = [(first + i, i * self.size) for i in range(layout.segments)]
        """Source word of each segment, and the segment's byte offset in a tensor."""
        self._place: torch.Tensor | None = None
        self.rows: NDArray[Any] | None = None
        # A field without payload names an address in every batch, and need not be set back.
        self._point: Callable[[int, int], None] = mailbox.words(entry).__setitem__
        if not layout.field.by_address:
            words = mailbox.entry(entry).view(torch.uint8)[layout.payload :]
            all_rows = words[: layout.total_bytes].view(layout.dtype)
            self._place = layout.head(all_rows.view(layout.shape(layout.capacity)), row_count)
            self.rows = None if layout.dtype is torch.bfloat16 else self._place.numpy()
            self._point = partial(mailbox.point, entry)
        # A field of several segments has no single address to copy to.
        single = self._place is not None and layout.segments == 1
        self.address = self._place.data_ptr() if single and self._place is not None else 0
        self.fast_path = (
            self.name, self.shape, self.rows, None if self.rows is None else self.rows.dtype,
            self.dtype, self.address, self.size, self.write,
        )  # fmt: skip

    @property
    def travels_by_address(self) -> bool:
        """Whether the graph reads the field through its address, not from the entry."""
        return self._place is None

    def write(self, value: Any) -> torch.Tensor | None:
        """Write the rows, or the address of the device tensor that holds them.

        Returns:
            A tensor that must stay alive until the device has read it, or ``None``.

        Raises:
            InputError: The value does not fit the field. Nothing was written.
        """
        if (
            type(value) is _Tensor
            and value.get_device() == self._device_index >= 0
            and value.dtype is self.dtype
            and value.shape == self.shape
            and value.is_contiguous()
        ):
            return self._point_to(value)
        tensor = validate_field(self.layout, value, self._row_count, self._device)
        if not tensor.is_cpu:
            return self._point_to(tensor)
        if self._place is not None:
            self._place.copy_(tensor)
            self._take_payload()
            return None
        if self._device_index < 0:  # host and device are one
            return self._point_to(tensor)
        staging = self._mailbox.staging(self.layout)
        place = staging.view(-1)[: tensor.numel()].view(tensor.shape)
        place.copy_(tensor)
        return self._point_to(place)

    def _take_payload(self) -> None:
        """Make the payload the source again."""
        for word, _ in self._segments:
            self._point(word, FROM_PAYLOAD)

    def _point_to(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.data_ptr()
        for word, offset in self._segments:
            self._point(word, address + offset)
        return tensor


class AxisWriters(dict[tuple[int, int], list[FieldWriter]]):
    """Writers of all fields of an axis, by entry and number of rows.

    They are cached by number of rows, because pairs of requests and tokens are too many to cache.
    """

    def __init__(
        self, mailbox: Mailbox, axis: Axis, layouts: Sequence[FieldLayout], device: torch.device
    ) -> None:
        self.axis = axis
        self._mailbox, self._layouts, self._device = mailbox, layouts, device

    def __missing__(self, key: tuple[int, int]) -> list[FieldWriter]:
        entry, rows = key
        self[key] = [
            FieldWriter(self._mailbox, entry, layout, rows, self._device)
            for layout in self._layouts
        ]
        return self[key]


class BatchWriter:
    """Writes all fields of a batch into one entry. Construction is cheap: field writers are shared.

    Args:
        mailbox: The mailbox of the entry.
        fields: The writer of each field of a batch.
    """

    def __init__(self, mailbox: Mailbox, fields: Sequence[FieldWriter]) -> None:
        self.mailbox = mailbox
        self._fields = fields
        self._plan = tuple([field.fast_path for field in fields])

    @cached_property
    def fields(self) -> dict[str, FieldWriter]:
        """Writer of each field, by name."""
        return {field.name: field for field in self._fields}

    @cached_property
    def views(self) -> dict[str, NDArray[Any]]:
        """Numpy view of each field that has one, by name."""
        return {field.name: field.rows for field in self._fields if field.rows is not None}

    @cached_property
    def by_address(self) -> frozenset[str]:
        """Names of the fields that the graph reads through their address."""
        return frozenset(field.name for field in self._fields if field.travels_by_address)

    def write(self, batch: Any) -> list[torch.Tensor]:
        """Write every field.

        Returns:
            Tensors that must stay alive until the device has read them.

        Raises:
            InputError: A field is missing or wrong. The entry may be written again.
        """
        in_flight = []
        for name, shape, rows, np_dtype, dtype, address, size, write in self._plan:
            value: Any = getattr(batch, name, None)
            kind = type(value)
            if kind is _Array:
                if value.dtype is np_dtype and value.shape == shape:
                    rows[...] = value  # type: ignore[index]
                    continue
            elif (
                kind is _Tensor
                and address
                and value.is_cpu
                and value.dtype is dtype
                and value.shape == shape
                and value.is_contiguous()
            ):
                _memmove(address, value.data_ptr(), size)
                continue
            try:
                kept = write(value)
            except InputError as error:
                layouts = [field.layout for field in self._fields]
                reason = wrong_count(error.field, batch, layouts)
                raise InputError(f"{error}{reason}", field=error.field) from error
            if kept is not None:
                in_flight.append(kept)
        return in_flight
