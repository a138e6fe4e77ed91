"""Where the arguments of a kernel may hold what is left over from the host's stack."""

from __future__ import annotations

from graphkit.records import Argument, Node

_LARGE, _FIRST_WORDS = 256, 32
_LEAVES_UNSET = "at::native::"
"""What torch's own kernels take behind the first bytes of a large struct is only partly set: steps
of dimensions that a tensor does not have. Libraries fill their descriptors to the last byte."""


def may_be_left_over(node: Node, argument: Argument, offset: int) -> bool:
    """Whether the bytes at an offset of an argument may mean nothing."""
    is_large = argument.kind == "struct" and argument.size > _LARGE
    return is_large and offset >= _FIRST_WORDS and _LEAVES_UNSET in node.name
