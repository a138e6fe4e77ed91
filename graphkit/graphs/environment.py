"""What this machine has, for records and for ``graphkit doctor``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from graphkit.graphs.driver import driver_version
from graphkit.records import Environment
from graphkit.version import __version__


def environment(device: torch.device) -> Environment:
    """Facts about the device and the libraries that shape a measurement."""
    is_cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        torch=torch.__version__,
        triton=installed("triton"),
        cuda=torch.version.cuda or "",
        driver=driver_version() if is_cuda else "",
        graphkit=__version__,
    )


def installed(distribution: str) -> str:
    """Version of an installed distribution, empty if it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
