"""What the slot and window ops demand of their arguments."""

from __future__ import annotations

import math

import torch

from graphkit.errors import InputError

INTEGERS = (torch.int32, torch.int64)


class Demands:
    """The shapes that an op takes, by argument, in the order of its signature.

    A shape is a word per dimension: a name stands for any size, and for the same size in every
    shape of the op; ``B*W`` is a product of such sizes. A number's shape is the name that it gives
    a size. ``!`` marks a tensor that is written in place and must be contiguous.

    Args:
        op: The op's name.
        shapes: Such as ``num_steps="S"``, ``accept_index="B A"`` or ``positions="T!"``.
    """

    def __init__(self, op: str, **shapes: str) -> None:
        self.op = op
        self._shapes = {name: shape.rstrip("!").split() for name, shape in shapes.items()}
        self._written = {name for name, shape in shapes.items() if shape.endswith("!")}

    def check(self, *arguments: torch.Tensor | int | None) -> None:
        """Refuse what does not fit; tensors must be int32 or int64 and on one device.

        Raises:
            InputError: It names the op, the argument, what came and what is taken.
        """
        given = dict(zip(self._shapes, arguments, strict=True))
        for name, each in given.items():
            if each is None:
                raise InputError(f"{self.op} got no {name}, but here it is needed.", field=name)
        numbers = {name: each for name, each in given.items() if isinstance(each, int)}
        tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        demand_at_least(self.op, 1, **numbers)
        sizes = {self._shapes[name][0]: number for name, number in numbers.items()}
        self._learn(tensors, sizes)
        device = next(iter(tensors.values())).device
        for name, tensor in tensors.items():
            self._check_tensor(name, tensor, sizes, device)

    def _learn(self, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
        """Note the size that each name stands for where it comes first."""
        for name, tensor in tensors.items():
            for word, size in zip(self._shapes[name], tensor.shape, strict=False):
                if "*" not in word:
                    sizes.setdefault(word, size)

    def _check_tensor(
        self, name: str, tensor: torch.Tensor, sizes: dict[str, int], device: torch.device
    ) -> None:
        words = self._shapes[name]
        shape = [math.prod(sizes.get(each, 1) for each in word.split("*")) for word in words]
        fits = list(tensor.shape) == shape and tensor.dtype in INTEGERS
        if not fits or tensor.device != device:
            wanted = f"[{', '.join(words)}]"
            wanted += f" = {shape}" if len(shape) == tensor.dim() else ""
            raise InputError(
                f"{self.op} got {name} of {list(tensor.shape)} {tensor.dtype} on {tensor.device}: "
                f"it must be {wanted} torch.int32 or torch.int64 on {device}.",
                field=name,
            )
        if name in self._written and not tensor.is_contiguous():
            raise InputError(
                f"{self.op} got {name} with strides {list(tensor.stride())}: it is written in "
                "place, so it must be contiguous. Pass the memory itself, not a strided view.",
                field=name,
            )


def demand_at_least(op: str, least: int, **numbers: int) -> None:
    """Refuse a number below ``least``.

    Raises:
        InputError: It names the op, the number and the bound.
    """
    for name, number in numbers.items():
        if number < least:
            raise InputError(
                f"{op} got {name} = {number}: it must be at least {least}.", field=name
            )
