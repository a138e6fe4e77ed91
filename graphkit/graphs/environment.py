"""Device and library versions, for records and for ``graphkit doctor``."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from graphkit.records import Environment
from graphkit.version import __version__


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

    Asks ``nvidia-smi`` once per process.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(answer.stdout.split()), "")
