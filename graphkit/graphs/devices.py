"""Choosing a device and the backend for it."""

from __future__ import annotations

import torch

from graphkit.errors import ConfigError, DeviceError
from graphkit.graphs.backend import Backend
from graphkit.graphs.cuda import CudaBackend
from graphkit.graphs.recorder import RecorderBackend

_shared: dict[torch.device, CudaBackend] = {}


def resolve_device(device: torch.device | str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU.

    Raises:
        DeviceError: CUDA was asked for and there is none.
        ConfigError: The device is of another kind.
    """
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"unknown device {device!r}: use auto, cpu or cuda.") from error
    if wanted.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {wanted} is not supported: use auto, cpu or cuda.")
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"no CUDA device for device={str(wanted)!r}: torch sees none.")
        given: int | None = wanted.index
        index = torch.cuda.current_device() if given is None else given
        return torch.device("cuda", index)
    return torch.device("cpu")


def backend_for(device: torch.device | str = "auto", backend: Backend | None = None) -> Backend:
    """The given backend, or the one for the device.

    CUDA runners of a process share one backend per device, hence one pool: an output is valid
    until the next replay of any of them. Give a runner a ``CudaBackend()`` of its own to part it.

    Raises:
        DeviceError: There is no such device.
        ConfigError: The backend works on another device.
    """
    if backend is None:
        wanted = resolve_device(device)
        if wanted.type == "cpu":
            return RecorderBackend()
        if wanted not in _shared:
            _shared[wanted] = CudaBackend(wanted)
        return _shared[wanted]
    if device != "auto" and resolve_device(device) != backend.device:
        raise ConfigError(
            f"device={str(device)!r}, but the {backend.name} backend works on {backend.device}."
        )
    return backend
