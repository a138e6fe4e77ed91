"""Device and library versions, for records and for ``graphkit doctor``."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from graphkit.records import Environment
from graphkit.version import __version__

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
