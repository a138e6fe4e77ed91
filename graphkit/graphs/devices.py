"""Devices: their selection, the backend for each, records of one, and copies to it."""

from __future__ import annotations

import re
import subprocess
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from graphkit.errors import ConfigError, DeviceError, short_repr
from graphkit.graphs.backend import Backend
from graphkit.records import Environment
from graphkit.version import __version__

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


_VERSION_FILE = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b\d{3,}(?:\.\d+)+")
"""The driver's version is the first number in the file with three digits before a dot."""


def environment(device: torch.device) -> Environment:
    """Describe the device and the versions of the libraries that affect a measurement."""
    is_cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        torch=torch.__version__,
        triton=package_version("triton"),
        cuda=torch.version.cuda or "",
        driver=driver_version() if is_cuda else "",
        graphkit=__version__,
    )


def package_version(distribution: str) -> str:
    """Return the version of an installed distribution, or an empty string."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@cache
def driver_version() -> str:
    """Return the NVIDIA driver's version, such as ``580.159.04``, or an empty string.

    Reads the file of the kernel module. Without it, asks ``nvidia-smi`` once per process.
    """
    with suppress(OSError):
        if found := _VERSION.search(_VERSION_FILE.read_text(encoding="utf-8")):
            return found.group()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(answer.stdout.split()), "")


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy host integers to the device, [N] int64."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    # torch.tensor is much slower for the thousands of tokens of a prompt (torch 2.13).
    return copied_to(device, torch.frombuffer(array("q", values), dtype=torch.int64))


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device; return it as it is if it is there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
