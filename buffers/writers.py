"""Writing one field's live rows into a mailbox slot: the innermost loop of a replay on the host.

The quick paths compare types, dtypes and shapes by identity and equality and copy at once; all
else goes through ``admit``, which casts or refuses.
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any

import numpy as np
import torch

from graphkit.buffers.admission import admit
from graphkit.buffers.layout import FieldLayout
from graphkit.buffers.mailbox import Mailbox, host_view
from graphkit.ops.refresh import FROM_PAYLOAD, Header

_NO_NUMPY = object()


class FieldWriter:
    """Writes a given number of live rows of one field into one slot.

    Attributes:
        name: The field.
        rows: The place in the slot as numpy, ``None`` if only the field's address travels.
        np_dtype: What a numpy value must have to be copied to ``rows`` as it is.
        shape: Likewise.
    """

    __slots__ = (
        "_address", "_device", "_device_index", "_dtype", "_first", "_layout", "_mailbox",
        "_place", "_row_count", "_size", "_slot", "_words", "name", "np_dtype", "rows", "shape",
    )  # fmt: skip

    def __init__(
        self, mailbox: Mailbox, slot: int, layout: FieldLayout, row_count: int, device: torch.device
    ) -> None:
        self.name = layout.name
        self._layout, self._mailbox, self._slot = layout, mailbox, slot
        self._row_count, self._device = row_count, device
        self._device_index = -1 if device.type == "cpu" else device.index
        self._words = mailbox.words(slot)
        self._first = int(Header.SOURCES) + layout.first_segment
        self._dtype, self.shape = layout.dtype, layout.shape(row_count)
        self._size = row_count * layout.row_bytes
        self._place: torch.Tensor | None = None
        self.rows: np.ndarray[Any, Any] | None = None
        if not layout.field.on_device:
            self._place, self.rows = host_view(mailbox, slot, layout, row_count)
        self.np_dtype = _NO_NUMPY if self.rows is None else self.rows.dtype
        # A field of several segments has no single address to copy to or from.
        single = self._place is not None and layout.segments == 1
        self._address = self._place.data_ptr() if single and self._place is not None else 0

    def write(self, value: Any) -> torch.Tensor | None:
        """Write the rows, or the address of the device tensor that holds them.

        Returns:
            What must stay alive until the device has read it, if anything.

        Raises:
            InputError: The value cannot stand for this field; nothing was written.
        """
        kind = type(value)
        if kind is np.ndarray:
            if value.dtype is self.np_dtype and value.shape == self.shape:
                self.rows[...] = value  # type: ignore[index]
                return self._from_payload()
        elif kind is torch.Tensor and value.dtype is self._dtype and value.shape == self.shape:
            if value.get_device() == self._device_index and self._layout.segments == 1:
                return self._write_device(value)
            if self._address and value.is_cpu and value.is_contiguous():
                memmove(self._address, value.data_ptr(), self._size)
                self._words[self._first] = FROM_PAYLOAD
                return None
        return self._write_admitted(value)

    def _write_device(self, value: torch.Tensor) -> torch.Tensor | None:
        if self._device_index < 0 and self._place is not None:  # host and device are one
            self._place.copy_(value)
            return self._from_payload()
        if not value.is_contiguous():
            return self._write_admitted(value)
        self._words[self._first] = value.data_ptr()
        return value

    def _write_admitted(self, value: Any) -> torch.Tensor | None:
        tensor = admit(self._layout, value, self._row_count, self._device)
        if tensor.get_device() == self._device_index and self._place is None:
            return self._point_to(tensor)
        if tensor.get_device() >= 0:
            return self._point_to(tensor)
        if self._place is None:
            staging = self._mailbox.staging(self._slot, self._layout)
            place = staging.view(-1)[: tensor.numel()].view(tensor.shape)
            place.copy_(tensor)
            return self._point_to(place)
        self._place.copy_(tensor)
        return self._from_payload()

    def _from_payload(self) -> torch.Tensor | None:
        for segment in range(self._layout.segments):
            self._words[self._first + segment] = FROM_PAYLOAD
        return None

    def _point_to(self, tensor: torch.Tensor) -> torch.Tensor:
        for segment in range(self._layout.segments):
            self._words[self._first + segment] = tensor.data_ptr() + segment * self._size
        return tensor
