"""What makes values of a declared type from what ``json`` gives, each value checked."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Floats that JSON lacks travel as text."""
_LARGEST = int(sys.float_info.max)
"""A whole number beyond it could not even be shown in KiB."""
_Reader = Callable[[Any], Any]

fields_of: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)
"""The fields of a dataclass."""


class MisfitError(Exception):
    """A value is not of its declared type; on its way up it learns where that is."""

    def __init__(self, what: str, *where: str) -> None:
        self.what, self.where = what, list(where)


def _make_reader(declared: Any) -> _Reader:
    """What makes a value of a declared type from what ``json`` gives."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return _reader_of_union([reader_of(each) for each in arguments])
    if origin is tuple:
        return _reader_of_list(reader_of(arguments[0]))
    if origin is Mapping:
        return _reader_of_mapping(reader_of(arguments[1]), arguments[0])
    if isinstance(declared, type) and is_dataclass(declared):
        return _reader_of_dataclass(declared)
    return {float: _read_float, int: _read_int}.get(declared) or _reader_of_plain(declared)


reader_of: Callable[[Any], _Reader] = cache(_make_reader)
"""Made once per type: a record may hold a hundred thousand values."""


def _reader_of_plain(declared: type) -> _Reader:
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
    return ODD[value] if isinstance(value, str) and value in ODD else _refuse(value)


def _reader_of_union(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except MisfitError:
                continue
        return _refuse(value)

    return read


def _reader_of_list(reader: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            _refuse(value)
        made: list[Any] = []
        try:
            for each in value:
                made.append(reader(each))  # noqa: PERF401 - its length says where it went wrong
        except MisfitError as misfit:
            misfit.where.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _reader_of_mapping(reader: _Reader, key_type: type) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value)
        return {_key(key, key_type): _under(key, reader, v, _keyed) for key, v in value.items()}

    return read


def _reader_of_dataclass(cls: type) -> _Reader:
    """Fields that the class does not know are a later release's and passed over."""
    hints = get_type_hints(cls)
    readers = {field.name: reader_of(hints[field.name]) for field in fields_of(cls)}
    needed = [f.name for f in fields_of(cls) if f.default is f.default_factory is MISSING]

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            _refuse(body)
        for name in needed:
            if name not in body:
                raise MisfitError("missing", f".{name}")
        return cls(**{k: _under(k, readers[k], v) for k, v in body.items() if k in readers})

    return read


def _under(name: str, reader: _Reader, value: Any, how: Callable[[str], str] = ".{}".format) -> Any:
    try:
        return reader(value)
    except MisfitError as misfit:
        misfit.where.append(how(name))
        raise


def _key(key: str, key_type: type) -> Any:
    """JSON's keys are text."""
    try:
        return key_type(key)
    except ValueError:
        raise MisfitError(f"no {key_type.__name__}", _keyed(key)) from None


def _keyed(key: str) -> str:
    """The place of a key that the record's writer chose, on one line whatever is in it."""
    return f"[{shown(key)}]"


def _refuse(value: Any) -> NoReturn:
    raise MisfitError(shown(value))


def shown(value: Any) -> str:
    """A value, cut short."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
