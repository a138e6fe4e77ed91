"""Tensors that a forward holds, such as its weights, and which of them others have replaced.

A graph reads the memory of its capture. A setter that assigns another tensor, or another module,
therefore changes nothing in replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.graphs.operations import extent_bytes, has_storage
from graphkit.records import tensor_text


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor at a place that a forward reaches. Does not keep the tensor alive.

    Attributes:
        container: What holds it.
        key: Its key there.
        begin, end: Its first address, and the one after its last element.
        text: Its dtype and shape.
    """

    container: Container
    key: Any
    begin: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """Path of the tensor, such as ``Model.head.weight``."""
        return self.container.name(self.key)

    @property
    def is_replaced(self) -> bool:
        """Whether another tensor is at its place now."""
        now = self.container.get(self.key)
        return isinstance(now, torch.Tensor) and has_storage(now) and now.data_ptr() != self.begin


class HeldTensors:
    """The tensors that a forward holds, as of construction.

    Args:
        objects: What the forward reaches.
    """

    def __init__(self, objects: ReachableObjects) -> None:
        self._tensors = [
            HeldTensor(
                container,
                key,
                tensor.data_ptr(),
                tensor.data_ptr() + extent_bytes(tensor),
                tensor_text(tensor.dtype, tensor.shape),
            )
            for container, key, tensor in objects.values_of(torch.Tensor)
            if has_storage(tensor) and not tensor.is_meta and tensor.numel()
        ]
        self._modules = list(objects.values_of(nn.Module))

    def keep_unchanged(self) -> None:
        """Forget the tensors that are replaced, such as those of each step's context."""
        replaced = {*map(id, self.replaced())}
        self._tensors = [tensor for tensor in self._tensors if id(tensor) not in replaced]

    def replaced(self) -> Sequence[HeldTensor]:
        """Return the tensors that are replaced, by themselves or with a module that holds them."""
        modules = tuple(f"{name}." for name in self._replaced_modules())
        return [
            tensor
            for tensor in self._tensors
            if tensor.is_replaced or (modules and tensor.name.startswith(modules))
        ]

    def _replaced_modules(self) -> Iterator[str]:
        for container, key, module in self._modules:
            now = container.get(key)
            if now is not module and isinstance(now, nn.Module):
                yield container.name(key)
