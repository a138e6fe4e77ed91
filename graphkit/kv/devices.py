"""Devices of pools."""

from __future__ import annotations

import torch

from graphkit.errors import ConfigError


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
