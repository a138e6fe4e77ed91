"""Launches a kernel by the names of its parameters.

This module has what graphkit uses of Triton's launcher, checked on Triton 3.6.0 and 3.7.1
(``tests/unit/ops/test_triton_names.py``): ``JITFunction.arg_names``, which is undocumented, and
programmatic dependent launch, the option ``launch_pdl`` with ``gdc_wait`` and
``gdc_launch_dependents`` (https://triton-lang.org/main/python-api/triton.language.extra.cuda.html).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernel_requests import kernel_requests
from graphkit.ops.kernels.devices import has_dependent_launch

KEPT_IN_L2 = tl.constexpr("evict_last")
"""Eviction policy of small tensors that every layer or step reads.

With the default policy, the weights that are read in between evict these tensors from the L2 cache,
and kernels wait for memory at their start.
"""


def launch(kernel: Any, grid: tuple[int, ...], args: Any, **others: Any) -> None:
    """Launch ``kernel`` on the current stream, unless its grid is empty.

    In a pass that compiles kernels in parallel it is requested instead; see ``KernelRequests``.

    A kernel with a parameter ``STARTS_EARLY`` may be started while the kernel before it runs, which
    hides the latency of the launch (programmatic dependent launch). If the device can do that, the
    parameter is true. Such a kernel follows these rules:

    - All of its programs call ``gdc_wait``, which returns when the kernel before has ended and its
      writes are visible. That kernel has waited for the one before it, and so on: kernels may thus
      call ``gdc_launch_dependents`` at their start (``wait_for_kernel_before``).
    - Before ``gdc_wait`` it writes nothing, and reads nothing that a kernel before it may write.
      Only weights are constant, and may be requested or read by then. A kernel that requests more
      than ``EARLY_BYTES`` of ``streamed_product.py`` by then has only that much in flight.
    - A kernel that stores keys calls ``gdc_launch_dependents`` after ``gdc_wait``
      (``wait_then_start_next``), and so does attention. When the kernel after a store starts, all
      kernels before the store have thus ended. Attention with ``follows_store`` may read what they
      wrote without a wait.
    - A kernel that reads much memory at the places that a page table gives calls
      ``gdc_launch_dependents`` after its first requests, so that its data arrive before the weights
      of the next kernel.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        args: The op's arguments. The kernel's parameters are read from it by name, tensors made
            contiguous.
        others: Parameters of the kernel that are passed as they are, whether or not ``args`` has
            them, tuples of tensors or numbers among them, and launch options such as ``num_warps``.
            ``STARTS_EARLY=False`` keeps a kernel from starting early.
    """
    if not all(grid):
        return
    arguments = {}
    for name in kernel.arg_names:
        if name in others:
            arguments[name] = others.pop(name)
        elif name != "STARTS_EARLY":
            value = getattr(args, name)
            arguments[name] = value.contiguous() if isinstance(value, torch.Tensor) else value
    if "STARTS_EARLY" in kernel.arg_names and "STARTS_EARLY" not in arguments:
        # All devices are the same, except that some tensors may be in pinned memory of the host.
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        arguments["STARTS_EARLY"] = any(has_dependent_launch(tensor.device) for tensor in tensors)
    if arguments.get("STARTS_EARLY"):
        others["launch_pdl"] = True
    ordered = [arguments[name] for name in kernel.arg_names]
    requests = kernel_requests.get()
    if requests is None or not requests.is_requesting:
        kernel[grid](*ordered, **others)
    else:
        requests.add(kernel, grid, ordered, others)


@triton.jit
def wait_for_kernel_before(STARTS_EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the one before; the rules are those of ``launch``."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_start_next(STARTS_EARLY: tl.constexpr):
    """Wait for the kernel before, and let the next one start then; see the rules of ``launch``."""
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def offset_after_wait(start):
    """Wait for the kernel before, let the next one start, and return 0, in a step of a loop.

    Triton moves the loads of the first steps in front of a loop, unless a statement between the
    loads has a side effect. The compiler takes this function for a pure expression. Add the result
    to the address of each load that has to follow the wait.

    Args:
        start: Number that differs between steps, so that the compiler keeps the wait of each.
    """
    offset = tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r,r", [start], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return offset * 16  # an address stays aligned
