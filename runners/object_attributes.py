"""Attributes and items of objects, read without running code of the objects.

A lazy proxy may load or raise whatever is asked of it. Types are therefore compared by ``is_a``,
attributes are read by ``own_attributes``, and lists by the methods of their built-in type.
"""

from __future__ import annotations

from collections import deque
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any

_MRO, _CLASS_DICT, _NAME = (
    vars(type)[name].__get__ for name in ("__mro__", "__dict__", "__name__")
)
"""Read an attribute of a class past its metaclass."""


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is of some types, without reading its ``__class__``."""
    return issubclass(type(value), kinds)


def bases(cls: type) -> tuple[type, ...]:
    """Return a class and its bases, in the order in which attributes are looked up."""
    return _MRO(cls)  # type: ignore[no-any-return]


def class_attributes(cls: type) -> MappingProxyType[str, Any]:
    """Return the attributes that a class itself defines."""
    return _CLASS_DICT(cls)  # type: ignore[no-any-return]


def type_name(cls: type) -> str:
    """Return the name of a class."""
    return _NAME(cls)  # type: ignore[no-any-return]


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the dict of an object's attributes; empty if it has none."""
    for base in bases(type(value)):
        slot: Any = class_attributes(base).get("__dict__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
            attributes = slot.__get__(value)
            return attributes if type(attributes) is dict else {}
    return {}


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple or a deque; ``None`` for other objects."""
    for kind in (list, tuple, deque):
        if is_a(value, kind):
            return list(kind.__iter__(value))
    return None
