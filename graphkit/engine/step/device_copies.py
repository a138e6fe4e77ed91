"""Copies of host numbers to the device that do not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy host integers to the device, as int64."""
    return copied_to(device, torch.tensor(values, dtype=torch.int64))


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device; return it as it is if it is there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
