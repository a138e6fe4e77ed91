"""Containers: dicts of named values that a forward reads, which can be read, set and restored.

Nothing here runs code of the objects, see ``graphkit.runners.known_memory``.

An ``nn.Module`` keeps its parameters, buffers and children in three dicts, whose names are private
to torch; checked with torch 2.11 and 2.13. ``tests/unit/audit/test_containers.py`` fails if a
later version keeps them elsewhere. Variables of closures are read by ``__code__.co_freevars`` and
``__closure__``, which Python documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import partial
from threading import local
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from graphkit.errors import short_repr
from graphkit.runners.known_memory import (
    bases,
    class_attributes,
    is_a,
    items_of,
    own_attributes,
    type_name,
)

MODULE_DICTS = ("_parameters", "_buffers", "_modules")
"""Attributes of ``nn.Module`` that hold its tensors and children by name."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of ``nn.Module`` that hold functions which run with its forward."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
SCALARS = (bool, int, float, complex, str, bytes, Enum, range, np.generic, torch.dtype)
"""Types of values without parts."""
_CLASS_VALUES = (*SCALARS, list, tuple, dict, deque, torch.Tensor)
"""Types of class attributes that count as values of the forward."""
_MAX_KEY = 40
"""Length of the text of a key in a name."""


class Container:
    """A dict of named values, or the part of one whose keys are kept.

    Subclasses read their values from another object, and say how one is set and deleted.

    Args:
        prefix: Name of the object that the values belong to.
        values: The dict, by reference; in subclasses what the values are read from.
        keep: Selects keys.

    Attributes:
        owner: The module, the function or the object that holds the values, directly or in a list
            or a dict.
        source: The object whose values these are.
        parent: The container and the key there at which it was found; ``None`` for a root.
    """

    has_items = False
    """Whether values are items, such as ``names[0]``, and no attributes."""

    def __init__(
        self, prefix: str, values: Any, keep: Callable[[Any], bool] = lambda _key: True
    ) -> None:
        self.owner: Any = None
        self.source: Any = None
        self.parent: tuple[Container, Any] | None = None
        self.prefix = prefix
        self._values = values
        self._keep = keep

    @property
    def place(self) -> int:
        """Identifies what holds the values while the container exists."""
        return id(self._values)

    def name(self, key: Any) -> str:
        """Return the full name of a value."""
        if self.has_items:
            return f"{self.prefix}[{short_repr(key, _MAX_KEY)}]"
        return f"{self.prefix}.{key}"

    def read(self) -> dict[Any, Any]:
        """Return the current values by key."""
        return {key: value for key, value in dict.items(self._values) if self._keep(key)}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the current value of a key, or a default."""
        return dict.get(self._values, key, default)

    def find(self, key: Any) -> Any:
        """Return the value at the same path now, also if an object on the way was replaced."""
        held = self.at(key)
        return None if held is None else held.get(key)

    def at(self, key: Any) -> Container | None:
        """Return the container of a key at the same path now, if there is one."""
        if self.parent is None or self.is_in_place:
            return self
        parent, own_key = self.parent
        now = containers(self.prefix, parent.find(own_key))
        return next((held for held in now if key in held.read()), None)

    @property
    def is_in_place(self) -> bool:
        """Whether no object on the path to it was replaced."""
        return self.parent is None or self.parent[0].find(self.parent[1]) is self.source

    def set(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        self._values[key] = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        """Set the values to those that ``read`` returned, and delete all others."""
        now = self.read()
        for key in now.keys() - saved.keys():
            self._delete(key)
        for key, value in saved.items():
            if key not in now or now[key] is not value:
                self.set(key, value)

    def _delete(self, key: Any) -> None:
        del self._values[key]


class _DictItems(Container):
    has_items = True


class _Computed(Container):
    """Values that are read from an object one by one, and set the same way."""

    def get(self, key: Any, default: Any = None) -> Any:
        return self.read().get(key, default)

    def _delete(self, key: Any) -> None:
        """Keep it: nothing in the program deletes such a value."""


class _ListItems(_Computed):
    """Items of a list, a deque or a tuple. Only lists are restored: a deque may be a log."""

    has_items = True

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(items_of(self._values) or ()))

    def set(self, key: Any, value: Any) -> None:
        for kind in (list, deque):
            if is_a(self._values, kind):
                kind.__setitem__(self._values, key, value)

    def restore(self, saved: Mapping[Any, Any]) -> None:
        if is_a(self._values, list):
            list.__setitem__(self._values, slice(None), [*saved.values()])


class _ClosureCells(_Computed):
    def __init__(self, prefix: str, function: FunctionType) -> None:
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        super().__init__(prefix, dict(zip(names, cells, strict=True)))

    def read(self) -> dict[Any, Any]:
        values = {}
        for name, cell in self._values.items():
            with suppress(ValueError):  # the variable is unbound
                values[name] = cell.cell_contents
        return values

    def set(self, key: Any, value: Any) -> None:
        self._values[key].cell_contents = value


class _Defaults(_Computed):
    def read(self) -> dict[Any, Any]:
        code, values = self._values.__code__, self._values.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        return {**dict(zip(names, values, strict=True)), **(self._values.__kwdefaults__ or {})}

    def set(self, key: Any, value: Any) -> None:
        if key in (named := self._values.__kwdefaults__ or {}):
            named[key] = value
        elif key in (values := self.read()):
            values[key] = value
            count = len(self._values.__defaults__ or ())
            self._values.__defaults__ = tuple(values.values())[:count]


class _ClassAttributes(_Computed):
    """Values among the attributes of a class, which an object may override later."""

    def __init__(self, cls: type, own: dict[str, Any]) -> None:
        super().__init__(type_name(cls), cls)
        self._own, self._hidden = own, frozenset(own)

    def read(self) -> dict[Any, Any]:
        return {
            key: value
            for key, value in class_attributes(self._values).items()
            if key not in self._hidden
            and (value is None or is_a(value, _CLASS_VALUES))
            and not key.startswith("__")
        }

    def get(self, key: Any, default: Any = None) -> Any:
        return self._own.get(key, class_attributes(self._values).get(key, default))

    def set(self, key: Any, value: Any) -> None:
        if key in self._own:
            self._own[key] = value
        else:
            setattr(self._values, key, value)


class _Variable(_Computed):
    """The value of a ``ContextVar`` in the current context."""

    def read(self) -> dict[Any, Any]:
        values = {}
        with suppress(LookupError):  # it is unset
            values["get"] = self._values.get()
        return values

    def set(self, _key: Any, value: Any) -> None:
        self._values.set(value)


class _Slots(_Computed):
    def __init__(self, prefix: str, owner: Any, slots: dict[str, MemberDescriptorType]) -> None:
        super().__init__(prefix, owner)
        self._slots = slots

    def read(self) -> dict[Any, Any]:
        values = {}
        for name, slot in self._slots.items():
            with suppress(AttributeError):  # nothing is assigned
                values[name] = slot.__get__(self._values)
        return values

    def set(self, key: Any, value: Any) -> None:
        self._slots[key].__set__(self._values, value)

    def _delete(self, key: Any) -> None:
        self._slots[key].__delete__(self._values)


def _slots(name: str, value: Any) -> Iterator[Container]:
    declaring = (class_attributes(base) for base in bases(type(value)))
    slots = {
        key: slot
        for attributes in declaring
        if "__slots__" in attributes
        for key, slot in attributes.items()
        if type(slot) is MemberDescriptorType
    }
    if slots:
        yield _Slots(name, value, slots)


def class_values(cls: type, own: dict[str, Any]) -> Container:
    """Return values among the attributes of a class.

    Args:
        cls: The class.
        own: Attributes of an object of the class, which override its own.
    """
    container = _ClassAttributes(cls, own)
    container.owner = cls
    return container


def containers(name: str, value: Any) -> Iterator[Container]:
    """Yield the containers of an object's own values."""
    attributes = own_attributes(value)
    if is_a(value, nn.Module):
        yield Container(name, attributes, lambda key: key not in _MODULE_ATTRIBUTES)
        for attribute in MODULE_DICTS:
            yield Container(name, attributes.get(attribute, {}))
        for attribute in _HOOKS:
            if attributes.get(attribute):
                yield _DictItems(f"{name}.{attribute}", attributes[attribute])
    elif is_a(value, FunctionType):
        yield _ClosureCells(name, value)
        yield _Defaults(name, value)
        yield Container(name, attributes)
    elif is_a(value, MethodType):
        yield from containers(type_name(type(value.__self__)), value.__self__)
        yield from containers(name, value.__func__)
    elif is_a(value, partial):
        yield Container(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    elif is_a(value, ReferenceType):
        yield from containers(f"{name}()", ReferenceType.__call__(value))
    elif is_a(value, local):
        yield Container(name, local.__getattribute__(value, "__dict__"))
    elif is_a(value, ContextVar):
        yield _Variable(name, value)
    elif is_a(value, dict):
        yield _DictItems(name, value)
    elif is_a(value, (list, tuple, deque)):
        yield _ListItems(name, value)
    else:
        yield Container(name, attributes)
        yield from _slots(name, value)
