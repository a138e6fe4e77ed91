"""Identify argument bytes that torch's kernels leave unset."""

from __future__ import annotations

from graphkit.records import Argument, Node

_LARGE_STRUCT, _ALWAYS_SET = 256, 32
_TORCH_KERNEL = "at::native::"
"""torch's own kernels take large structs by value and set them in part: strides of dimensions that
a tensor does not have keep what the host's stack held. Libraries set their descriptors in full."""


def may_be_unset(node: Node, argument: Argument, offset: int) -> bool:
    """Return whether the bytes at an offset of a kernel argument may be leftovers of the stack."""
    is_large = argument.kind == "struct" and argument.size > _LARGE_STRUCT
    return is_large and offset >= _ALWAYS_SET and _TORCH_KERNEL in node.name
