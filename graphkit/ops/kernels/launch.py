"""Launches a kernel by the names of its parameters.

This module has what graphkit uses of Triton's launcher, checked on Triton 3.6.0 and 3.7.1
(``tests/unit/ops/test_triton_names.py``): ``JITFunction.arg_names``, which is undocumented, and
programmatic dependent launch, the option ``launch_pdl`` with ``gdc_wait`` and
``gdc_launch_dependents`` (https://triton-lang.org/main/python-api/triton.language.extra.cuda.html).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], args: Any, **others: Any) -> None:
    """Launch ``kernel`` on the current stream, unless its grid is empty.

    A kernel with a parameter ``STARTS_EARLY`` may be started while the kernel before it runs, which
    hides the latency of the launch (programmatic dependent launch). If the device can do that, the
    parameter is true, and the kernel must call ``gdc_wait`` before it reads or writes memory.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        args: The op's arguments. The kernel's parameters are read from it by name, tensors made
            contiguous.
        others: Parameters of the kernel that are passed as they are, whether or not ``args`` has
            them, and launch options such as ``num_warps``.
    """
    if not all(grid):
        return
    if "STARTS_EARLY" in kernel.arg_names:
        device = next(value.device for value in others.values() if isinstance(value, torch.Tensor))
        others["STARTS_EARLY"] = has_dependent_launch(device)
        if others["STARTS_EARLY"]:
            others["launch_pdl"] = True
    arguments = []
    for name in kernel.arg_names:
        if name in others:
            arguments.append(others.pop(name))
        else:
            value = getattr(args, name)
            arguments.append(value.contiguous() if isinstance(value, torch.Tensor) else value)
    kernel[grid](*arguments, **others)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a device has programmatic dependent launch: compute capability 9.0."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) >= (9, 0)
