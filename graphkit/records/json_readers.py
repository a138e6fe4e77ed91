"""Readers that convert JSON values to a declared type and check each value."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Floats that JSON lacks are written as text."""
_LARGEST = int(sys.float_info.max)
"""A larger integer cannot be converted to a float, for instance to show KiB."""
_Reader = Callable[[Any], Any]

fields_of: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)
"""The fields of a dataclass, cached."""


class TypeMismatchError(Exception):
    """A value is not of its declared type; each caller appends where the value is."""

    def __init__(self, value: str, *where: str) -> None:
        self.value, self.where = value, list(where)


def _make_reader(declared: Any) -> _Reader:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return _union_reader([reader_of(each) for each in arguments])
    if origin is tuple:
        return _list_reader(reader_of(arguments[0]))
    if origin is Mapping:
        return _mapping_reader(reader_of(arguments[1]), arguments[0])
    if isinstance(declared, type) and is_dataclass(declared):
        return _dataclass_reader(declared)
    return {float: _read_float, int: _read_int}.get(declared) or _exact_reader(declared)


reader_of: Callable[[Any], _Reader] = cache(_make_reader)
"""Returns the reader of a declared type. Cached: a record may hold a hundred thousand values."""


def _exact_reader(declared: type) -> _Reader:
    def read(value: Any) -> Any:
        return value if type(value) is declared else _refuse(value)

    return read


def _read_int(value: Any) -> int:
    return value if type(value) is int and abs(value) <= _LARGEST else _refuse(value)


def _read_float(value: Any) -> float:
    if type(value) in (float, int):
        try:
            return float(value)
        except OverflowError:
            _refuse(value)
    is_non_finite = isinstance(value, str) and value in NON_FINITE
    return NON_FINITE[value] if is_non_finite else _refuse(value)


def _union_reader(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except TypeMismatchError:
                continue
        return _refuse(value)

    return read


def _list_reader(reader: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            _refuse(value)
        made: list[Any] = []
        try:
            for each in value:
                made.append(reader(each))  # noqa: PERF401 - its length is the index of a mismatch
        except TypeMismatchError as mismatch:
            mismatch.where.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _mapping_reader(reader: _Reader, key_type: type) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value)
        return {
            _read_key(key, key_type): _read_at(_key_path(key), reader, each)
            for key, each in value.items()
        }

    return read


def _dataclass_reader(cls: type) -> _Reader:
    """Make a reader that ignores unknown fields, which later releases may write."""
    hints = get_type_hints(cls)
    readers = {field.name: reader_of(hints[field.name]) for field in fields_of(cls)}
    needed = [f.name for f in fields_of(cls) if f.default is f.default_factory is MISSING]

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            _refuse(body)
        for name in needed:
            if name not in body:
                raise TypeMismatchError("missing", f".{name}")
        known = {name: each for name, each in body.items() if name in readers}
        return cls(**{n: _read_at(f".{n}", readers[n], each) for n, each in known.items()})

    return read


def _read_at(where: str, reader: _Reader, value: Any) -> Any:
    try:
        return reader(value)
    except TypeMismatchError as mismatch:
        mismatch.where.append(where)
        raise


def _read_key(key: str, key_type: type) -> Any:
    """Convert a JSON key, which is always text."""
    try:
        return key_type(key)
    except ValueError:
        raise TypeMismatchError(f"not of type {key_type.__name__}", _key_path(key)) from None


def _key_path(key: str) -> str:
    return f"[{shortened_repr(key)}]"


def _refuse(value: Any) -> NoReturn:
    raise TypeMismatchError(shortened_repr(value))


def shortened_repr(value: Any) -> str:
    """Return the repr of a value, at most 43 characters long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
