"""Copies of host numbers to the device that do not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy host numbers to the device without waiting for it."""
    return copied_to(device, torch.tensor(values, dtype=dtype))


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for it; return it as it is if it is there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
