"""Launches a kernel by the names of its parameters."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], given: Any, **others: Any) -> None:
    """Launch ``kernel`` on the current stream, unless its grid is empty.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        given: The op's arguments. The kernel's parameters are read from it by name, tensors made
            contiguous.
        others: Parameters of the kernel that are passed as they are, whether or not ``given`` has
            them, and launch options such as ``num_warps``.
    """
    if not all(grid):
        return
    arguments = []
    for name in kernel.arg_names:
        if name in others:
            arguments.append(others.pop(name))
        else:
            each = getattr(given, name)
            arguments.append(each.contiguous() if isinstance(each, torch.Tensor) else each)
    kernel[grid](*arguments, **others)
