"""What things were at one moment, so that a later look can say what changed, and put them back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from graphkit.audit.reachable_objects import MOST_ITEMS, ReachableObjects

_PLAIN = (bool, int, float, complex, str, bytes, Enum, np.generic)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator)
_TOLD = (torch.Tensor, np.ndarray, *_GENERATORS, list, set, deque, *_PLAIN)
_MOST_SHOWN = 40
_MOST_NUMBERS = 4
"""Tensors of so few numbers are told by them."""
_CHUNK = 1 << 20
"""Words that are added up at once: it bounds the memory that a checksum takes."""


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    """What a value was.

    Attributes:
        text: For people.
        content: What is the same as long as its content is.
        address: Where a tensor lies; ``None`` for what is no tensor.
    """

    text: str
    content: Any
    address: int | None = None


ABSENT = ObjectSummary("nothing", None)
"""There is nothing of that name, or something that is told by what it holds."""


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """Something that is not what it was."""

    name: str
    before: ObjectSummary
    after: ObjectSummary

    @property
    def is_built(self) -> bool:
        """Whether it was made where there was nothing, as a cache is."""
        return self.before.content is None

    @property
    def is_replaced(self) -> bool:
        """Whether a tensor gave way to another one, or to something else."""
        return self.before.address not in (None, self.after.address)


class ObjectSnapshot:
    """Everything that forwards can reach, and random numbers, at the moment of its making.

    Tensors are told by checksum, so that a model's weights need not be copied.

    Args:
        roots: See ``ReachableObjects``.
        tensors: Those with names of their own.

    Attributes:
        images: What there was, by name.
    """

    def __init__(self, roots: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._held = ReachableObjects(roots)
        self._checksums: dict[Any, int] = {}
        self.images = {name: self._image(tensor) for name, tensor in tensors.items()}
        for holder, entries in self._held.entries:
            for key, value in entries.items():
                if _is_told(value):
                    self.images.setdefault(holder.name(key), self._image(value))
        self.images |= {name: ObjectSummary(name, state) for name, state in _random_states()}

    def changes(self, later: ObjectSnapshot) -> Iterator[ObjectChange]:
        """What is not the same later; a tensor of two names is told once."""
        told: set[int | None] = set()
        for name in {**self.images, **later.images}:
            before, after = self.images.get(name, ABSENT), later.images.get(name, ABSENT)
            is_told = after.address is not None and after.address in told
            if before != after and not is_told:
                told.add(after.address)
                yield ObjectChange(name, before, after)

    def put_back(self) -> None:
        """See ``ReachableObjects.put_back``."""
        self._held.put_back()

    def _image(self, value: Any) -> ObjectSummary:
        if isinstance(value, torch.Tensor):
            return self._image_of_tensor(value)
        if isinstance(value, np.ndarray):
            return ObjectSummary(f"{value.dtype} {list(value.shape)}", hash(value.tobytes()))
        if isinstance(value, _GENERATORS):
            return ObjectSummary("random numbers", _state_of(value))
        if value is None:
            return ABSENT
        if isinstance(value, _PLAIN):
            text = repr(value)  # not the value: nan is not itself, and True is 1
            return ObjectSummary(
                text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...", text
            )
        return ObjectSummary(f"{len(value)} items", len(value))

    def _image_of_tensor(self, tensor: torch.Tensor) -> ObjectSummary:
        dtype = str(tensor.dtype).removeprefix("torch.")
        text = f"{dtype} {list(tensor.shape)}"
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return ObjectSummary(text, text, id(tensor))
        address = tensor.data_ptr()
        key = (address, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._checksums:
            self._checksums[key] = checksum(tensor)
        if tensor.numel() <= _MOST_NUMBERS:
            text = f"{text} {tensor.tolist()}"
        return ObjectSummary(text, (text, self._checksums[key]), address)


def checksum(tensor: torch.Tensor) -> int:
    """A number that depends on every bit of a strided tensor and on where the bit stands."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    total = 0
    for begin in range(0, whole, 8 * _CHUNK):
        words = data[begin : min(begin + 8 * _CHUNK, whole)].clone().view(torch.int64)
        odd = torch.arange(1 + begin // 4, 1 + begin // 4 + 2 * len(words), 2, device=words.device)
        total += int((words * odd).sum())
    rest = data[whole:].tolist()
    return hash((total, len(data), *rest))


def _is_told(value: Any) -> bool:
    """Whether it is told itself; a small dict is told by what it holds."""
    if isinstance(value, dict):
        return len(value) > MOST_ITEMS
    return value is None or isinstance(value, _TOLD)


def _state_of(generator: torch.Generator | random.Random | np.random.Generator) -> int:
    if isinstance(generator, torch.Generator):
        return checksum(generator.get_state())
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    return hash(repr(generator.bit_generator.state))


def _random_states() -> Iterator[tuple[str, int]]:
    """Every generator that a forward shares with others."""
    yield "torch's random numbers on the CPU", checksum(torch.random.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "torch's random numbers on CUDA", checksum(torch.cuda.get_rng_state())
    yield "Python's random numbers", hash(random.getstate())
    _, key, at, *_ = np.random.get_state(legacy=True)
    yield "numpy's random numbers", hash((np.asarray(key).tobytes(), at))
