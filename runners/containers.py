"""Containers: dicts of named values that a forward reads, which can be read, set and restored.

An ``nn.Module`` keeps its parameters, buffers and children in three dicts, whose names are private
to torch; checked with torch 2.11 and 2.13. ``tests/unit/runners/test_containers.py`` fails if a
later version keeps them elsewhere. Variables of closures are read by ``__code__.co_freevars`` and
``__closure__``, which Python documents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

MODULE_DICTS = ("_parameters", "_buffers", "_modules")
"""Attributes of ``nn.Module`` that hold its tensors and children by name."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_CLASS_VALUES = (bool, int, float)
"""Types of class attributes that count as values of the forward."""


class Container:
    """A dict of named values, or the part of one whose keys are kept.

    Args:
        prefix: Name of the object that the values belong to.
        values: The dict, by reference.
        keep: Selects keys.
        name_format: Format of a full name, from prefix and key.

    Attributes:
        owner: The module, the function or the object that holds the values, directly or in a list
            or a dict.
    """

    def __init__(
        self,
        prefix: str,
        values: dict[Any, Any],
        keep: Callable[[Any], bool] = lambda _key: True,
        name_format: str = "{}.{}",
    ) -> None:
        self.owner: Any = None
        self.prefix = prefix
        self._values = values
        self._keep, self._name_format = keep, name_format

    @property
    def place(self) -> int:
        """Identifies the storage of the values while the container exists."""
        return id(self._values)

    def name(self, key: Any) -> str:
        """Return the full name of a value."""
        return self._name_format.format(self.prefix, key)

    def read(self) -> dict[Any, Any]:
        """Return the current values by key."""
        return {key: value for key, value in self._values.items() if self._keep(key)}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the current value of a key, or a default."""
        return self._values.get(key, default)

    def set(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        self._values[key] = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        """Set the values to those that ``read`` returned, and delete all others."""
        now = self.read()
        for key in now.keys() - saved.keys():
            del self._values[key]
        for key, value in saved.items():
            if key not in now or now[key] is not value:
                self.set(key, value)


class _ListItems(Container):
    """Items of a list or a tuple."""

    def __init__(self, prefix: str, items: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(prefix, {}, name_format="{}[{}]")
        self._items = items

    @property
    def place(self) -> int:
        return id(self._items)

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._items))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._items[key] if key < len(self._items) else default

    def set(self, key: Any, value: Any) -> None:
        if isinstance(self._items, list):
            self._items[key] = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        if isinstance(self._items, list):
            self._items[:] = saved.values()


class _ClosureCells(Container):
    """Variables that a function closes over."""

    def __init__(self, prefix: str, function: FunctionType) -> None:
        super().__init__(prefix, {})
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._cells: dict[str, CellType] = dict(zip(names, cells, strict=True))

    def read(self) -> dict[Any, Any]:
        return {name: value for name, cell in self._cells.items() for value in _contents(cell)}

    def get(self, key: Any, default: Any = None) -> Any:
        return next(iter(_contents(self._cells[key])), default)

    def set(self, key: Any, value: Any) -> None:
        self._cells[key].cell_contents = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        for name, value in saved.items():
            self.set(name, value)


class _ClassAttributes(Container):
    """Numbers among the attributes of a class.

    Args:
        cls: The class.
        hidden: Attributes that an instance has, too.
    """

    def __init__(self, cls: type, hidden: Collection[str]) -> None:
        super().__init__(cls.__name__, {}, lambda key: key not in hidden)
        self._class = cls

    @property
    def place(self) -> int:
        return id(self._class)

    def read(self) -> dict[Any, Any]:
        values = {key: value for key, value in vars(self._class).items() if self._keep(key)}
        return {key: value for key, value in values.items() if type(value) in _CLASS_VALUES}

    def get(self, key: Any, default: Any = None) -> Any:
        return vars(self._class).get(key, default)

    def set(self, key: Any, value: Any) -> None:
        setattr(self._class, key, value)

    def restore(self, saved: Mapping[Any, Any]) -> None:
        for key, value in saved.items():
            if self.get(key) is not value:
                self.set(key, value)


def class_numbers(cls: type, hidden: Collection[str]) -> Container:
    """Return the numbers among the attributes of a class.

    Args:
        cls: The class.
        hidden: Attributes that an instance has, too.
    """
    container = _ClassAttributes(cls, hidden)
    container.owner = cls
    return container


def containers(name: str, value: Any) -> Iterator[Container]:
    """Yield the containers of an object's own values.

    Args:
        name: Name of the object.
        value: The object.
    """
    if isinstance(value, nn.Module):
        yield Container(name, vars(value), lambda key: key not in _MODULE_ATTRIBUTES)
        for attribute in MODULE_DICTS:
            yield Container(name, getattr(value, attribute))
    elif isinstance(value, FunctionType):
        yield _ClosureCells(name, value)
        yield Container(name, vars(value))
    elif isinstance(value, MethodType):
        yield from containers(type(value.__self__).__name__, value.__self__)
        yield from containers(name, value.__func__)
    elif isinstance(value, partial):
        yield Container(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    elif isinstance(value, dict):
        yield Container(name, value, name_format="{}[{!r}]")
    elif isinstance(value, (list, tuple)):
        yield _ListItems(name, value)
    else:
        yield Container(name, vars(value))


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return the content of a cell, or nothing while its variable is unbound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
