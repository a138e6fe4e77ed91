"""Launches a kernel by the names of its parameters."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], given: Any, **others: Any) -> None:
    """Launch ``kernel`` on the current stream, unless its grid is empty.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        given: The op's arguments. Those that the kernel has a parameter for are passed, tensors
            made contiguous.
        others: Further arguments of the kernel and options such as ``num_warps``, passed as they
            are. They replace arguments of ``given`` of the same name.
    """
    if not all(grid):
        return
    for name, each in given._asdict().items():
        if name in kernel.arg_names and name not in others:
            others[name] = each.contiguous() if isinstance(each, torch.Tensor) else each
    kernel[grid](**others)
