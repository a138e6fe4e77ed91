"""What kernels ask of a device."""

from __future__ import annotations

from functools import cache

import torch

from graphkit.errors import DeviceError


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, (0, 0) of others."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether kernels may start early (programmatic dependent launch), from 9.0 on."""
    return _capability(device) >= (9, 0)


def has_warpgroups(device: torch.device) -> bool:
    """Return whether the device has ``wgmma``, which exists on compute capability 9.0 alone."""
    return _capability(device)[0] == 9


def has_float8_cvt(device: torch.device) -> bool:
    """Return whether PTX converts float8_e4m3fn to float16, from compute capability 8.9 on."""
    return _capability(device) >= (8, 9)


def has_bfloat16_fma(device: torch.device) -> bool:
    """Return whether PTX multiplies and adds pairs of bfloat16, from compute capability 8.0 on.

    Kernels are compiled as if they could where there is no CUDA device.
    """
    return device.type != "cuda" or _capability(device) >= (8, 0)


def check_float8(device: torch.device, op: str) -> None:
    """Refuse a CUDA device whose kernels cannot write or widen float8_e4m3fn.

    Raises:
        DeviceError: Its compute capability is below 8.9.
    """
    major, minor = _capability(device)
    if (0, 0) < (major, minor) < (8, 9):
        raise DeviceError(
            f"{op}: float8_e4m3fn needs compute capability 8.9, but {device} has {major}.{minor}. "
            "Use bfloat16, or weights of four bits."
        )


@cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """Return the multiprocessors of a device and the bytes of shared memory of each.

    On other devices than CUDA, as in the interpreter, they are those of an H200.
    """
    if device.type != "cuda":
        return 132, 233472
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor
