"""Collectives of ``torch.distributed`` as operations that a recorder runs again."""

from __future__ import annotations

from typing import Any

import torch

_NAMESPACES = ("c10d", "_c10d_functional")


def is_collective(op: torch._ops.OpOverload) -> bool:
    """Return whether an operation communicates with other ranks."""
    return str(op.namespace) in _NAMESPACES


def is_wrapper(op: torch._ops.OpOverload) -> bool:
    """Return whether an operation only wraps the tensor of a collective that may be running."""
    return str(op.name()) == "_c10d_functional::_wrap_tensor_autograd"


def finished(op: torch._ops.OpOverload, out: Any) -> Any:
    """Wait for a collective, as a stream of the device does, and return its result.

    Args:
        op: The collective.
        out: What it returned: tensors and a ``Work``, or the tensor of a functional collective.
    """
    if op.namespace == "c10d":
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, torch.ScriptObject):
                each.wait()  # type: ignore[attr-defined]  # a Work
        return out
    if isinstance(out, list):
        return [torch.ops._c10d_functional.wait_tensor(each) for each in out]
    return torch.ops._c10d_functional.wait_tensor(out)
