"""Numbers of the host that a forward can read, and their values at capture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots
from graphkit.errors import short_repr

_NUMBERS = (bool, int, float)
_MISSING = object()
_ITEM = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number that a forward can read, the length of a list, or the content of a set.

    Attributes:
        container: What holds it.
        key: Its key there.
        before: Its value when it was found; of a set a copy.
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
        value = self.container.get(self.key, _MISSING)
        if value is _MISSING or (self.is_length and not isinstance(value, list)):
            return self.before
        if self.is_length:
            return len(value)
        return frozenset(value) if type(value) is set else value

    @property
    def is_changed(self) -> bool:
        """Whether its value differs from the earlier one."""
        now = self.now
        if now is self.before:
            return False
        if type(now) is not type(self.before):
            return True
        both_nan = type(now) is float and math.isnan(now) and math.isnan(self.before)
        return bool(now != self.before) and not both_nan

    @property
    def now_text(self) -> str:
        """Current value as text, or its type if it is neither a number nor a set."""
        return value_text(self.now)

    def set(self, value: Any) -> None:
        """Set the number. A list is shortened, or extended with copies of its last item."""
        items = self.container.get(self.key)
        if type(items) is set:
            items.clear()
            items.update(value)
        elif self.is_length:
            del items[value:]
            items.extend((items[-1:] or [None]) * (value - len(items)))
        else:
            self.container.set(self.key, value)


class HostNumbers:
    """The numbers that a forward can read: attributes, closure variables, globals and list lengths.

    A number counts if the code of the forward contains its name, or the name of the list or the
    dict that holds it. So does a set, whose members may decide a branch.

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
                is_number = type(value) in (*_NUMBERS, list, set, frozenset)
                if is_number and read_word(container, key) in objects.words:
                    is_list = type(value) is list
                    before = frozenset(value) if type(value) is set else value
                    number = HostNumber(container, key, len(value) if is_list else before, is_list)
                    numbers.setdefault((container.place, key), number)
        self.numbers, self.words = tuple(numbers.values()), objects.words

    def changed(self) -> list[HostNumber]:
        """Return the numbers whose values differ from those at construction."""
        return [number for number in self.numbers if number.is_changed]

    @contextmanager
    def varied(self, values: Mapping[HostNumber, Any]) -> Iterator[None]:
        """Change numbers for a block.

        Restores all references that the forward can reach after the block, and removes caches that
        the forward creates in it. The contents of tensors are not restored.
        """
        objects = ReachableObjects(self._roots, SEARCH_DEPTH)
        collections = [n.container.get(n.key) for n in values]
        saved = [(held, held.copy()) for held in collections if type(held) in (list, set)]
        try:
            for number in sorted(values, key=lambda n: n.is_length):  # items before lengths
                number.set(values[number])
            yield
        finally:
            objects.restore()
            for held, content in saved:
                held.clear()
                (held.extend if type(held) is list else held.update)(content)


def value_text(value: Any) -> str:
    """Return a number or a set as text, or the type of another value."""
    if type(value) is frozenset:
        return short_repr(set(value)) if value else "an empty set"
    return repr(value) if value is None or type(value) in _NUMBERS else f"a {type(value).__name__}"


def read_word(container: Container, key: Any) -> str:
    """Return the name under which code reads a value, or the list or dict that holds it."""
    if isinstance(key, str):
        return key
    return _ITEM.sub("", container.prefix).rpartition(".")[2]
