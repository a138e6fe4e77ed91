"""Readers that convert JSON values to a declared type and check each value."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from graphkit.records.numbers import Count, Duration

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Floats that JSON lacks are written as text."""
_LARGEST = int(sys.float_info.max)
"""A larger integer cannot be converted to a float, for instance to show KiB."""
_Reader = Callable[[Any], Any]

fields_of: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)
"""The fields of a dataclass, cached."""


class InvalidValueError(Exception):
    """A value is not of its declared type, or contradicts other values.

    Attributes:
        value: What was found, as text.
        expected: What was expected; empty if ``value`` implies it.
        where: Path of the value, innermost part first; each caller appends its part.
    """

    def __init__(self, value: str, expected: str = "", *where: str) -> None:
        self.value, self.expected, self.where = value, expected, list(where)


def _make_reader(declared: Any) -> _Reader:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return _union_reader([reader_of(each) for each in arguments], _expected(declared))
    if origin is Annotated:
        return {int: _read_count, float: _read_duration}[arguments[0]]
    if origin is tuple:
        return _list_reader(reader_of(arguments[0]))
    if origin is Mapping:
        return _mapping_reader(reader_of(arguments[1]), arguments[0])
    if isinstance(declared, type) and is_dataclass(declared):
        return _dataclass_reader(declared)
    return {float: _read_float, int: _read_int}.get(declared) or _exact_reader(declared)


reader_of: Callable[[Any], _Reader] = cache(_make_reader)
"""Returns the reader of a declared type. Cached: a record may hold a hundred thousand values."""

_EXPECTED: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
    tuple: "a list",
    Count: "an integer of at least 0",
    Duration: "a finite number of at least 0",
}


def _expected(declared: Any) -> str:
    if get_origin(declared) in (Union, types.UnionType):
        return " or ".join(map(_expected, get_args(declared)))
    return _EXPECTED.get(declared) or _EXPECTED.get(get_origin(declared), "an object")


def _exact_reader(declared: type) -> _Reader:
    expected = _expected(declared)

    def read(value: Any) -> Any:
        if type(value) is not declared:
            raise _unexpected(value, expected)
        return value

    return read


def _read_int(value: Any) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise _unexpected(value, _EXPECTED[int])
    return value


def _read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _unexpected(value, _EXPECTED[Count])
    return value


def _read_float(value: Any) -> float:
    if type(value) in (float, int):
        try:
            return float(value)
        except OverflowError:
            raise _unexpected(value, _EXPECTED[float]) from None
    if not isinstance(value, str) or value not in NON_FINITE:
        raise _unexpected(value, _EXPECTED[float])
    return NON_FINITE[value]


def _read_duration(value: Any) -> float:
    if type(value) not in (float, int) or not 0 <= value <= _LARGEST:
        raise _unexpected(value, _EXPECTED[Duration])
    return float(value)


def _union_reader(readers: list[_Reader], expected: str) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except InvalidValueError as invalid:
                if invalid.where:  # of the right type, but a value in it is invalid
                    raise
        raise _unexpected(value, expected)

    return read


def _list_reader(reader: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unexpected(value, _EXPECTED[tuple])
        made: list[Any] = []
        try:
            for each in value:
                made.append(reader(each))  # noqa: PERF401 - its length is the index of an error
        except InvalidValueError as invalid:
            invalid.where.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _mapping_reader(reader: _Reader, key_type: type) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _unexpected(value, "an object")
        return {
            _read_key(key, key_type): _read_at(_key_path(key), reader, each)
            for key, each in value.items()
        }

    return read


def _dataclass_reader(cls: type) -> _Reader:
    """Make a reader that ignores unknown fields, which later releases may write.

    A method ``check_contents`` of the dataclass is called with each object that was read.
    """
    hints = get_type_hints(cls, include_extras=True)
    readers = {field.name: reader_of(hints[field.name]) for field in fields_of(cls)}
    needed = [f.name for f in fields_of(cls) if f.default is f.default_factory is MISSING]
    check: Callable[[Any], None] | None = getattr(cls, "check_contents", None)

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            raise _unexpected(body, "an object")
        for name in needed:
            if name not in body:
                raise InvalidValueError("missing", "", f".{name}")
        known = {name: each for name, each in body.items() if name in readers}
        made = cls(**{n: _read_at(f".{n}", readers[n], each) for n, each in known.items()})
        if check is not None:
            check(made)
        return made

    return read


def _read_at(where: str, reader: _Reader, value: Any) -> Any:
    try:
        return reader(value)
    except InvalidValueError as invalid:
        invalid.where.append(where)
        raise


def _read_key(key: str, key_type: type) -> Any:
    """Convert a JSON key, which is always text."""
    try:
        return key_type(key)
    except ValueError:
        raise InvalidValueError(f"not of type {key_type.__name__}", "", _key_path(key)) from None


def _key_path(key: str) -> str:
    return f"[{shortened_repr(key)}]"


def _unexpected(value: Any, expected: str) -> InvalidValueError:
    return InvalidValueError(shortened_repr(value), expected)


def shortened_repr(value: Any) -> str:
    """Return the repr of a value, at most 43 characters long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
