"""Memory of the tensors that an operation reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphkit.graphs.capture_rules import tensors_in

Operand = tuple[int, int]
"""Address of a tensor's first element, and its ``distinct_bytes``."""


def operands_in(values: Any) -> Iterator[Operand]:
    """Yield the memory of each dense tensor in arguments and results, at any depth."""
    for tensor in tensors_in(values):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            yield tensor.data_ptr(), distinct_bytes(tensor)


def arguments_written(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operation writes."""
    declared = op._schema.arguments
    given = {**dict(zip((each.name for each in declared), args, strict=False)), **kwargs}
    for each in declared:
        if each.alias_info is not None and each.alias_info.is_write:
            yield from tensors_in(given.get(each.name))


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's elements take at most: their number's or their extent's."""
    return tensor.nbytes if tensor.is_contiguous() else min(tensor.nbytes, extent_bytes(tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in dimensions)) * tensor.element_size()
