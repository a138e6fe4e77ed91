"""Checks of the arguments of pools."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphkit.config import is_int
from graphkit.errors import AttentionError, ConfigError


def device_of(owner: str, device: object) -> torch.device:
    """Return the device that a setting names.

    Args:
        owner: Name of the class that the setting belongs to.
        device: A ``torch.device`` or its name.

    Raises:
        ConfigError: It names no device of this machine.
    """
    if isinstance(device, (str, torch.device)):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise ConfigError(f"{owner}.device must be a torch.device, got {device!r}.", field="device")


def ints_to_free(owner: str, values: object) -> list[int]:
    """Return the rows or slots to free as a list.

    Args:
        owner: Name of the pool's class.
        values: A tensor, or an iterable of ints.

    Raises:
        AttentionError: It is neither.
    """
    given = values.tolist() if isinstance(values, torch.Tensor) else values
    if isinstance(given, Iterable):
        listed = list(given)
        if all(map(is_int, listed)):
            return listed
    raise AttentionError(f"{owner} cannot free {values!r}. Pass what alloc returned.")
