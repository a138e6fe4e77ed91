"""Numbers of the host that a forward can read, and their values at capture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphkit.runners.containers import Container
from graphkit.runners.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots

_NUMBERS = (bool, int, float)
_MISSING = object()
_ITEM = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number that a forward can read, or the length of a list.

    Attributes:
        container: What holds it.
        key: Its key there.
        before: Its value when it was found.
        is_length: Whether it is the length of the list at ``key``.
    """

    container: Container
    key: Any
    before: float
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
        return len(value) if self.is_length else value

    @property
    def is_changed(self) -> bool:
        """Whether its value differs from the earlier one."""
        now = self.now
        if now is self.before:
            return False
        both_nan = all(isinstance(one, float) and math.isnan(one) for one in (now, self.before))
        return type(now) is not type(self.before) or (now != self.before and not both_nan)

    @property
    def now_text(self) -> str:
        """Current value as text, or its type if it is not a number."""
        now = self.now
        return repr(now) if now is None or type(now) in _NUMBERS else f"a {type(now).__name__}"

    def set(self, value: Any) -> None:
        """Set the number. A list is shortened, or extended with copies of its last item."""
        if not self.is_length:
            self.container.set(self.key, value)
            return
        items = self.container.get(self.key)
        del items[value:]
        items.extend(items[-1:] * (value - len(items)))


class HostNumbers:
    """The numbers that a forward can read: attributes, closure variables, globals and list lengths.

    A number counts if the code of the forward contains its name, or the name of the list or the
    dict that holds it.

    Args:
        forward: The forward, or a sequence of forwards.

    Attributes:
        numbers: Each number once, with its value at construction.
    """

    def __init__(self, forward: Any) -> None:
        self._roots = walk_roots(forward)
        objects = ReachableObjects(self._roots, SEARCH_DEPTH)
        found: dict[tuple[int, Any], HostNumber] = {}
        for container, values in objects.entries:
            for key, value in values.items():
                is_list = type(value) is list
                if (is_list or type(value) in _NUMBERS) and read_word(
                    container, key
                ) in objects.words:
                    number = HostNumber(container, key, len(value) if is_list else value, is_list)
                    found.setdefault((container.place, key), number)
        self.numbers = tuple(found.values())

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
        lists = [n.container.get(n.key) for n in values if n.is_length]
        items = [list(found) for found in lists]
        try:
            for number in sorted(values, key=lambda n: n.is_length):  # items before lengths
                number.set(values[number])
            yield
        finally:
            objects.restore()
            for found, saved in zip(lists, items, strict=True):
                found[:] = saved


def read_word(container: Container, key: Any) -> str:
    """Return the name under which code reads a value, or the list or dict that holds it."""
    if isinstance(key, str):
        return key
    return _ITEM.sub("", container.prefix).rpartition(".")[2]
