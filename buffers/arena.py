"""Device memory of a runner's fields: one allocation, and the storage of bound fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphkit.buffers.layout import FieldLayout
from graphkit.errors import ConfigError

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
