"""Numbers of the host that a forward can read, and their values at capture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from graphkit.audit.host_objects.containers import SCALARS, Container
from graphkit.audit.host_objects.reachable_objects import (
    MAX_ITEMS,
    SEARCH_DEPTH,
    ReachableObjects,
    walk_roots,
)
from graphkit.errors import short_repr
from graphkit.runners.known_memory import is_a, own_attributes, type_name

_COLLECTIONS = (list, set, dict, np.ndarray)
_MAX_TEXT = 160
_MISSING = object()
_ITEM = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True, slots=True, eq=False)
class HostNumber:
    """A number, the length of a list, or another value that may decide a branch of a forward.

    Other values are strings, members of enums, ``None``, tuples of such, sets, the keys of dicts,
    and small arrays.

    Attributes:
        container: What holds it.
        key: Its key there.
        before: Its value when it was found; of a set, a dict and an array a copy.
        is_length: Whether it is the length of the list at ``key``.
    """

    container: Container
    key: Any
    before: Any
    is_length: bool = False

    @property
    def name(self) -> str:
        """Path of the number, such as ``Model.temperature`` or ``len(Model.history)``."""
        name = self.container.name(self.key)
        return f"len({name})" if self.is_length else name

    @property
    def now(self) -> Any:
        """Current value, or the earlier one if the entry no longer exists."""
        return self.read(self.place)

    def read(self, place: Container) -> Any:
        """Return the value that is in ``place`` now, or the earlier one."""
        value = place.get(self.key, _MISSING)
        if value is _MISSING or (self.is_length and not isinstance(value, list)):
            return self.before
        return len(value) if self.is_length else _copied(value)

    @property
    def place(self) -> Container:
        """What holds it now: another object may have replaced one on its path."""
        return self.container.at(self.key) or self.container

    @property
    def now_text(self) -> str:
        """Current value as text, or its type if it has parts."""
        return value_text(self.now)

    def set(self, value: Any) -> None:
        """Set the number. A list is shortened, or extended with copies of its last item."""
        items = self.place.get(self.key)
        if self.is_length:
            del items[value:]
            items.extend((items[-1:] or [None]) * (value - len(items)))
        elif type(items) is dict is type(value):  # other numbers are the values of their keys
            _refill(items, {key: items.get(key, value[key]) for key in value})
        elif not _refill(items, value):
            self.place.set(self.key, _copied(value))


class HostNumbers:
    """The numbers that a forward can read: attributes, closure variables, globals and list lengths.

    A number counts if the code of the forward contains its name, or the name of the list or the
    dict that holds it. So do other values that may decide a branch.

    Attributes:
        numbers: Each number once, with its value at construction.
        words: The words that the code of the forward contains.
    """

    def __init__(self, forward: Any) -> None:
        self._roots = walk_roots(forward)
        objects = ReachableObjects(self._roots, SEARCH_DEPTH)
        numbers: dict[tuple[int, Any], HostNumber] = {}
        for container, values in objects.entries:
            for key, value in values.items():
                if _is_value(value) and read_word(container, key) in objects.words:
                    is_list = type(value) is list
                    before = len(value) if is_list else _copied(value)
                    number = HostNumber(container, key, before, is_list)
                    numbers.setdefault((container.place, key), number)
        self.numbers, self.words = tuple(numbers.values()), objects.words

    def changed(self) -> list[HostNumber]:
        """Return the numbers whose values differ from those at construction."""
        containers = {number.container for number in self.numbers}
        in_place = {container for container in containers if container.is_in_place}
        changed = []
        for number in self.numbers:
            place = number.container if number.container in in_place else number.place
            now, before = number.read(place), number.before
            if now is not before and _content(now) != _content(before):
                changed.append(number)
        return changed

    @contextmanager
    def varied(self, values: Mapping[HostNumber, Any]) -> Iterator[None]:
        """Change numbers for a block.

        Restores all references that the forward can reach after the block, and removes caches that
        the forward creates in it. The contents of tensors are not restored.
        """
        objects = ReachableObjects(self._roots, SEARCH_DEPTH)
        collections = [number.place.get(number.key) for number in values]
        saved = [(held, held.copy()) for held in collections if type(held) in _COLLECTIONS]
        try:
            for number in sorted(values, key=lambda n: n.is_length):  # items before lengths
                number.set(values[number])
            yield
        finally:
            objects.restore()
            for held, content in saved:
                _refill(held, content)


def value_text(value: Any) -> str:
    """Return a value as text, or the name of its type if its parts are not compared."""
    if type(value) is frozenset:
        return short_repr(set(value)) if value else "an empty set"
    if type(value) is dict:
        return f"the keys {short_repr([*value])}"
    if type(value) is np.ndarray:
        return short_repr(value.tolist())
    if not _is_constant(value):
        return f"a {type_name(type(value))}"
    text = scalar_text(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def scalar_text(value: Any) -> str:
    """Return a scalar, or a tuple of them, as text, as the built-in types write it."""
    for kind in (int, float, complex, str, bytes):
        if is_a(value, kind) and type(value) is not bool:
            return kind.__repr__(value)
    if is_a(value, tuple):
        return f"({', '.join(map(scalar_text, tuple.__iter__(value)))})"
    if is_a(value, Enum):  # whose own text may be anything
        member = own_attributes(value)
        return f"<{type_name(type(value))}.{member['_name_']}: {short_repr(member['_value_'])}>"
    return repr(value)


def _is_constant(value: Any) -> bool:
    """Return whether a value has no parts that may change."""
    if is_a(value, tuple):
        return all(map(_is_constant, tuple.__iter__(value)))
    return value is None or is_a(value, SCALARS)


def _is_value(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.size <= MAX_ITEMS and value.dtype.kind in "biufc"
    if type(value) is dict:
        return len(value) <= MAX_ITEMS
    return type(value) in (list, set, frozenset) or _is_constant(value)


def _copied(value: Any) -> Any:
    if type(value) is set:
        return frozenset(value)
    return value.copy() if type(value) in (dict, np.ndarray) else value


def _content(value: Any) -> Any:
    """Return what is equal for equal values, without code of their classes."""
    if type(value) in (frozenset, dict):
        return frozenset(value)
    if type(value) is np.ndarray:
        return value.dtype, value.shape, value.tobytes()
    return scalar_text(value) if _is_constant(value) else type(value)


def _refill(held: Any, content: Any) -> bool:
    """Give a collection a content in place, and return whether it can have it."""
    if type(held) is np.ndarray is type(content) and held.shape == content.shape:
        held[...] = content
    elif type(held) is list is type(content):
        held[:] = content
    elif (type(held), type(content)) in ((set, set), (set, frozenset), (dict, dict)):
        held.clear()
        held.update(content)
    else:
        return False
    return True


def read_word(container: Container, key: Any) -> str:
    """Return the name under which code reads a value, or the list or dict that holds it."""
    if isinstance(key, str):
        return key
    return _ITEM.sub("", container.prefix).rpartition(".")[2]
