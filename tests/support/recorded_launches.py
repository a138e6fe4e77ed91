"""What the kernels of an op are compiled for, recorded on the CPU as if an H200 ran them."""

from __future__ import annotations

from functools import wraps

import torch
import triton

from graphkit.ops.kernels import devices
from graphkit.ops.registration import OPS


def compiled_for(kernel, args, options):
    """Return what Triton compiles a kernel for: its constants, and some properties of the others.

    Numbers are 1, multiples of 16 or others, unless the kernel says that it does not matter.
    """
    key = [kernel.__name__, *sorted((name, str(value)) for name, value in options.items())]
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr:
            key.append(str(value))
        elif isinstance(value, torch.Tensor):
            key.append(str(value.dtype))
        elif isinstance(value, bool) or not isinstance(value, int):
            key.append(type(value).__name__)
        elif not parameter.do_not_specialize:
            is_aligned = value % 16 == 0 and not parameter.do_not_specialize_on_alignment
            key.append("1" if value == 1 else "16" if is_aligned else "int")
    return tuple(key)


def record_launches(monkeypatch):
    """Let every op launch its kernels, too, and return the set of what these are compiled for."""
    seen = set()

    def run(kernel, *args, grid, warmup, **options):
        seen.add(compiled_for(kernel, args, options))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(devices, "_capability", lambda _: (9, 0))
    for op in OPS.values():
        monkeypatch.setitem(op.__dict__, "reference", _launching(op))
    return seen


def _launching(op):
    reference = op.reference

    @wraps(reference)
    def launch_and_compute(*args):
        op.launch(op.arguments(*args))
        return reference(*args)

    return launch_and_compute
