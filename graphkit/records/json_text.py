"""Frozen dataclasses to JSON text and back, every value checked against its declared type.

Not-a-number and the infinities, which JSON lacks, travel as text. A dataclass whose ``SPARSE`` is
true is one of many: it is written on a line of its own, without the fields that are as declared.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from graphkit.errors import RecordError

SCHEMA = 1
"""Counts changes that an older reader could misread."""

_ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KINDS: dict[str, type[Record]] = {}
_Reader = Callable[[Any], Any]


class Record:
    """What is written down whole, as JSON text that says its kind."""

    __slots__ = ()
    KIND: ClassVar[str]

    def __init_subclass__(cls) -> None:
        _KINDS[cls.KIND] = cls  # slots make each class twice; the second, which stays, is kept

    def to_json(self) -> str:
        """The record as JSON text."""
        return _text({"schema": SCHEMA, "kind": self.KIND, **_facts(self)}, "\n") + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record.

        Raises:
            RecordError: The text is truncated, foreign, or of a newer schema.
        """
        body = _body(text)
        if body.get("kind") != cls.KIND:
            raise RecordError(f"not a {cls.KIND} record of graphkit.")
        record: Self = _read(cls, body)
        return record

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: The file cannot be read, or holds no such record.
        """
        return cls.from_json(_file_text(path))


def load_record(path: str | Path) -> Record:
    """Read a record of any kind from a file.

    Raises:
        RecordError: The file cannot be read, or holds no record.
    """
    body = _body(_file_text(path))
    if body["kind"] not in _KINDS:
        raise RecordError(
            f"{path} is no record of graphkit: its kind is {_shown(body.get('kind'))}."
        )
    record: Record = _read(_KINDS[body["kind"]], body)
    return record


def _file_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read record {path}: {error}.") from error


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole record: {_brief(error)}.") from error
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise RecordError("not a record of graphkit.")
    return body


def _read(cls: type[Record], body: dict[str, Any]) -> Any:
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(
            f"record has schema {schema!r}, this graphkit reads up to {SCHEMA}. Upgrade graphkit."
        )
    try:
        return _reader(cls)(body)
    except _MisfitError as misfit:
        where = "".join([cls.KIND, *reversed(misfit.where)])
        raise RecordError(f"not a whole record: {where} is {misfit.what}.") from None


def _facts(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in _fields(type(record))}


def _text(value: Any, newline: str) -> str:
    """A value as JSON; ``newline`` begins a line at the value's own depth."""
    if is_dataclass(value):
        if getattr(value, "SPARSE", False):
            return json.dumps(_sparse(value), allow_nan=False, separators=(",", ":"))
        value = _facts(value)
    deeper = newline + "  "
    if isinstance(value, Mapping) and value:
        items = (f"{json.dumps(str(key))}: {_text(each, deeper)}" for key, each in value.items())
        return "{" + deeper + ("," + deeper).join(items) + newline + "}"
    if isinstance(value, (list, tuple)) and value:
        return "[" + deeper + ("," + deeper).join(_text(v, deeper) for v in value) + newline + "]"
    return json.dumps(_number(value), allow_nan=False)


def _sparse(value: Any) -> Any:
    """A value as what ``json`` writes, dataclasses without the fields that are as declared."""
    if is_dataclass(value):
        facts = ((field, getattr(value, field.name)) for field in _fields(type(value)))
        return {f.name: _sparse(fact) for f, fact in facts if fact != _default(f)}
    if isinstance(value, Mapping):
        return {str(key): _sparse(each) for key, each in value.items()}
    return [_sparse(each) for each in value] if isinstance(value, tuple) else _number(value)


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, odd in _ODD.items() if repr(odd) == repr(value))
    return value


_fields: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


class _MisfitError(Exception):
    """A value is not of its declared type; on its way up it learns where that is."""

    def __init__(self, what: str, *where: str) -> None:
        self.what, self.where = what, list(where)


def _make_reader(declared: Any) -> _Reader:
    """What makes a value of a declared type from what ``json`` gives."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return _reader_of_union([_reader(each) for each in arguments])
    if origin is tuple:
        return _reader_of_list(_reader(arguments[0]))
    if origin is Mapping:
        return _reader_of_mapping(_reader(arguments[1]), arguments[0])
    if isinstance(declared, type) and is_dataclass(declared):
        return _reader_of_dataclass(declared)
    return _read_float if declared is float else _reader_of_plain(declared)


_reader: Callable[[Any], _Reader] = cache(_make_reader)
"""Made once per type: a record may hold a hundred thousand values."""


def _reader_of_plain(declared: type) -> _Reader:
    def read(value: Any) -> Any:
        return value if type(value) is declared else _refuse(value)

    return read


def _read_float(value: Any) -> float:
    if type(value) in (float, int):
        return float(value)
    return _ODD[value] if isinstance(value, str) and value in _ODD else _refuse(value)


def _reader_of_union(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except _MisfitError:
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
        except _MisfitError as misfit:
            misfit.where.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


def _reader_of_mapping(reader: _Reader, key_type: type) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value)
        return {_key(key, key_type): _under(key, reader, each) for key, each in value.items()}

    return read


def _reader_of_dataclass(cls: type) -> _Reader:
    """Fields that the class does not know are a later release's and passed over."""
    hints = get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name]) for field in _fields(cls)}
    needed = [f.name for f in _fields(cls) if f.default is f.default_factory is MISSING]

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            _refuse(body)
        for name in needed:
            if name not in body:
                raise _MisfitError("missing", f".{name}")
        return cls(**{k: _under(k, readers[k], v) for k, v in body.items() if k in readers})

    return read


def _under(name: str, reader: _Reader, value: Any) -> Any:
    try:
        return reader(value)
    except _MisfitError as misfit:
        misfit.where.append(f".{name}")
        raise


def _key(key: str, key_type: type) -> Any:
    """JSON's keys are text."""
    try:
        return key_type(key)
    except ValueError:
        raise _MisfitError(f"no {key_type.__name__}", f".{key}") from None


def _refuse(value: Any) -> NoReturn:
    raise _MisfitError(_shown(value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(". ")
