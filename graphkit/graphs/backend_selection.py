"""Selection of a device and of the backend for it."""

from __future__ import annotations

import torch

from graphkit.errors import ConfigError, DeviceError, short_repr
from graphkit.graphs.backend import Backend

_shared: dict[torch.device, Backend] = {}


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device that a setting names; a CUDA device with its index.

    Args:
        device: ``auto`` (CUDA if available, otherwise the CPU), ``cpu``, ``cuda``, ``cuda:N`` or a
            ``torch.device``.

    Raises:
        DeviceError: CUDA was requested and is not available.
        ConfigError: The device is of another type.
    """
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"unknown device {short_repr(device)}: use auto, cpu or cuda.") from error
    if wanted.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {wanted} is not supported: use auto, cpu or cuda.")
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                f"no CUDA device for device={str(wanted)!r}: torch finds none. "
                "Use device='cpu', which runs the recorder."
            )
        named: int | None = wanted.index
        index = torch.cuda.current_device() if named is None else named
        return torch.device("cuda", index)
    return torch.device("cpu")


def backend_for(device: torch.device | str = "auto", backend: Backend | None = None) -> Backend:
    """Return the backend that a caller passes, or else the shared one of the device.

    The runners of a process share one backend per device, and so one memory pool: an output is
    valid until the next replay of any of them. Pass a runner its own ``CudaBackend()`` or
    ``RecorderBackend()`` to give it a separate pool. Threads that replay at the same time need
    separate pools.

    Args:
        device: As for ``resolve_device``.
        backend: A backend to use instead.

    Raises:
        DeviceError: The device does not exist.
        ConfigError: The device is of another type, or the backend uses another device.
    """
    if backend is None:
        wanted = resolve_device(device)
        if wanted not in _shared:
            _shared[wanted] = _new_backend(wanted)
        return _shared[wanted]
    if not all(hasattr(backend, name) for name in ("name", "device", "session", "capture")):
        raise ConfigError(
            f"backend must be a graphkit.Backend or None, got {short_repr(backend)}.",
            field="backend",
        )
    if device != "auto" and resolve_device(device) != backend.device:
        raise ConfigError(
            f"device={str(device)!r} contradicts backend={backend.name}, which uses "
            f"{backend.device}. Pass one of them."
        )
    return backend


def _new_backend(device: torch.device) -> Backend:
    """Return a backend of a device. A process that uses one kind loads that kind alone."""
    if device.type == "cpu":
        from graphkit.graphs.recorder import RecorderBackend

        return RecorderBackend()
    from graphkit.graphs.cuda import CudaBackend

    return CudaBackend(device)
