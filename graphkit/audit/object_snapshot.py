"""Snapshots of the host objects and tensors that a forward can reach.

Tensors are compared by checksum, so that the weights of a model need not be copied.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphkit.audit.bits import checksum
from graphkit.audit.host_objects.containers import SCALARS
from graphkit.audit.host_objects.host_numbers import scalar_text
from graphkit.audit.host_objects.reachable_objects import MAX_ITEMS, ReachableObjects
from graphkit.records import count_of, tensor_text
from graphkit.runners.known_memory import is_a

RANDOM_STATE = "random state"
"""Text of a random generator."""
_GENERATORS = (torch.Generator, random.Random, np.random.Generator)
_SIZED = (list, set, deque, dict)
_SUMMARIZED = (torch.Tensor, np.ndarray, *_GENERATORS, *_SIZED, *SCALARS)
_MAX_TEXT = 40
_MAX_ELEMENTS = 4
"""Tensors of up to this many elements are shown with their elements."""


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    """Content of an object at the time of a snapshot.

    Attributes:
        content: Equal for equal content.
        address: Data pointer of a tensor; ``None`` for other objects.
    """

    text: str
    content: Any
    address: int | None = None


ABSENT = ObjectSummary("nothing", None)
"""Summary of a missing name, of ``None``, and of containers whose items have their own names."""


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """A difference between two snapshots.

    Attributes:
        name: Name of the object, such as ``Model.layers.0.steps``.
        before, after: The object in each snapshot.
    """

    name: str
    before: ObjectSummary
    after: ObjectSummary

    @property
    def is_created(self) -> bool:
        """True if the earlier snapshot has no such object, as for a cache."""
        return self.before.content is None

    @property
    def is_replaced(self) -> bool:
        """True if a tensor was replaced by one at another address, or by another object."""
        return self.before.address not in (None, self.after.address)


class ObjectSnapshot:
    """Everything that forwards can reach, further tensors by name, and the shared random states.

    Attributes:
        summaries: Objects by name.
    """

    def __init__(self, roots: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._objects = ReachableObjects(roots)
        self._checksums: dict[Any, int] = {}
        self.summaries = {name: self._summary(tensor) for name, tensor in tensors.items()}
        for container, values in self._objects.entries:
            for key, value in values.items():
                if _is_summarized(value):
                    self.summaries.setdefault(container.name(key), self._summary(value))
        for name, state in _shared_random_states():
            self.summaries[name] = ObjectSummary(RANDOM_STATE, state)

    def changes(self, later: ObjectSnapshot) -> Iterator[ObjectChange]:
        """Yield the differences of a later snapshot.

        A tensor with two names appears once, and a list with more items without these.
        """
        reported: set[int | str | None] = set()
        for name in {**self.summaries, **later.summaries}:
            before, after = self.summaries.get(name, ABSENT), later.summaries.get(name, ABSENT)
            is_reported = after.address is not None and after.address in reported
            is_item = (before is ABSENT or after is ABSENT) and name.rpartition("[")[0] in reported
            if before != after and not is_reported and not is_item:
                reported |= {after.address, name}
                yield ObjectChange(name, before, after)

    def restore(self) -> None:
        """Restore references, see ``ReachableObjects.restore``."""
        self._objects.restore()

    def _summary(self, value: Any) -> ObjectSummary:
        if is_a(value, torch.Tensor):
            return self._summary_of_tensor(value)
        if is_a(value, np.ndarray):
            return ObjectSummary(tensor_text(value.dtype, value.shape), hash(value.tobytes()))
        if is_a(value, _GENERATORS):
            return ObjectSummary(RANDOM_STATE, _generator_state(value))
        if value is None:
            return ABSENT
        if is_a(value, SCALARS):
            text = scalar_text(value)  # compared instead of the value: NaN != NaN, and True == 1
            shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
            return ObjectSummary(shown, text)
        length = next(kind.__len__(value) for kind in _SIZED if is_a(value, kind))
        return ObjectSummary(count_of(length, "item"), length)

    def _summary_of_tensor(self, tensor: torch.Tensor) -> ObjectSummary:
        text = tensor_text(tensor.dtype, tensor.shape)
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return ObjectSummary(text, text, id(tensor))
        address = tensor.data_ptr()
        key = (address, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._checksums:
            self._checksums[key] = checksum(tensor)
        if tensor.numel() <= _MAX_ELEMENTS:
            text = f"{text} {tensor.tolist()}"
        return ObjectSummary(text, (text, self._checksums[key]), address)


def _is_summarized(value: Any) -> bool:
    """Return whether a value gets a summary; the items of small dicts get their own."""
    if is_a(value, dict):
        return dict.__len__(value) > MAX_ITEMS
    return value is None or is_a(value, _SUMMARIZED)


def _generator_state(generator: torch.Generator | random.Random | np.random.Generator) -> int:
    if isinstance(generator, torch.Generator):
        return checksum(generator.get_state())
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    return hash(repr(generator.bit_generator.state))


def _shared_random_states() -> Iterator[tuple[str, int]]:
    """Yield name and state of each generator that a process shares."""
    yield "torch.default_generator", checksum(torch.random.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "torch.cuda.default_generators", checksum(torch.cuda.get_rng_state())
    yield "random", hash(random.getstate())
    _, key, position, *_ = np.random.get_state(legacy=True)
    yield "numpy.random", hash((np.asarray(key).tobytes(), position))
