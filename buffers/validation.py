"""Check of a value for a field: cast it to the field's dtype, or refuse it by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from graphkit.buffers.layout import Axis, FieldLayout
from graphkit.errors import InputError

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def validate_field(
    layout: FieldLayout, value: Any, rows: int, device: torch.device
) -> torch.Tensor:
    """Return the value as a contiguous tensor of the field's dtype, on ``device`` or the CPU.

    Arrays and tensors on the host are cast by the kind of their dtype, whatever their values are:
    integers and bools of any width to an integer or a bool that holds each value, floats to a float
    field, rounded. Python numbers also stand for floats. Device tensors must match exactly, because
    a cast would launch a kernel and allocate memory.

    Raises:
        InputError: The value is missing or has the wrong type, shape, dtype, device or strides, or
            a number is outside the range of the field's dtype.
    """
    if value is None:
        raise _refusal(layout, "is missing", f"Pass {layout.shape(rows)} {layout.dtype}.")
    tensor = _as_tensor(layout, value)
    if tensor.layout is not torch.strided:
        raise _refusal(layout, "is sparse", "Pass .to_dense().")
    if tensor.device.type != "cpu" and tensor.device != device:
        raise _refusal(layout, f"is on {tensor.device}", f"Move it to {device} or the CPU.")
    if tuple(tensor.shape) != layout.shape(rows):
        raise _refusal(
            layout, f"has shape {tuple(tensor.shape)}", f"This batch needs {layout.shape(rows)}."
        )
    if tensor.dtype is not layout.dtype:
        tensor = _cast(layout, tensor)
    if tensor.is_contiguous():
        return tensor
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    raise _refusal(layout, f"has strides {tensor.stride()}", "Pass .contiguous().")


def wrong_count(field: str | None, batch: Any, layouts: Iterable[FieldLayout]) -> str:
    """Return why the field that counts the requests is wrong, or an empty string.

    A batch has as many requests as its first field per request has rows, and other fields are
    refused that have another number. If they all agree on that number, the first one is wrong.

    Args:
        field: The field that was refused.
        batch: The batch.
        layouts: Layouts of its fields.
    """
    rows: dict[Axis, dict[str, int]] = {Axis.REQUEST: {}, Axis.TOKEN: {}, Axis.NONE: {}}
    for layout in layouts:
        value = getattr(batch, layout.name, None)
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
            rows[layout.field.axis][layout.name] = len(value)
    counting, requests = next(iter(rows[Axis.REQUEST].items()), ("", 0))
    numbers = {n for name, n in rows[Axis.REQUEST].items() if name != counting}
    tokens = {*rows[Axis.TOKEN].values()}
    if field == counting or len(numbers) != 1 or not min(numbers) or requests in numbers:
        return ""
    number = min(numbers)
    if not tokens or any(t % number or not t % max(requests, 1) for t in tokens):
        return ""
    return f" {counting!r} has {requests} rows, and all other fields are of {number} requests."


def _as_tensor(layout: FieldLayout, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        array = np.array(value)  # a copy: torch warns of read-only memory
        is_number = not isinstance(value, (np.ndarray, np.generic)) and array.dtype.kind in "biu"
        if is_number and layout.dtype.is_floating_point:
            array = array.astype(np.float64)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        is_array = isinstance(value, np.ndarray)
        fact = f"is numpy {value.dtype}" if is_array else f"is a {type(value).__name__}"
        raise _refusal(layout, fact, "Pass a tensor or a numpy array of numbers.") from error


def _cast(layout: FieldLayout, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise _refusal(layout, f"is {tensor.dtype}", f"Device tensors must be {layout.dtype}.")
    if tensor.is_complex() or tensor.is_floating_point() != layout.dtype.is_floating_point:
        raise _refusal(layout, f"is {tensor.dtype}", f"Pass {layout.dtype}.")
    # Unsigned values are compared as int64: their bits may represent a negative number.
    exact = tensor.long() if tensor.dtype in _UNSIGNED else tensor
    cast = exact.to(layout.dtype)
    if tensor.is_floating_point():
        # Formats of one byte have no isfinite.
        kept = cast.double().isfinite() | ~exact.double().isfinite()
    else:
        kept = cast.to(exact.dtype) == exact
        if tensor.dtype in _UNSIGNED:
            kept &= exact >= 0
    if not bool(kept.all()):
        raise _refusal(
            layout,
            f"is {tensor.dtype} with values that {layout.dtype} cannot hold",
            f"Pass {layout.dtype}.",
        )
    return cast


def _refusal(layout: FieldLayout, fact: str, remedy: str) -> InputError:
    return InputError(f"field {layout.name!r} {fact}. {remedy}", field=layout.name)
