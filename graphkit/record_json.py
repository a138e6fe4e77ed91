"""Frozen dataclasses to JSON text and back, every value checked against its declared type.

Not-a-number and the infinities, which JSON lacks, travel as text.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from graphkit.errors import RecordError

SCHEMA = 1
"""Counts changes that an older reader could misread."""

_ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
RecordT = TypeVar("RecordT")


class Record:
    """What is written down whole, as JSON text that says its kind."""

    __slots__ = ()
    KIND: ClassVar[str]

    def to_json(self) -> str:
        """The record as JSON text."""
        return to_json(self.KIND, self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record.

        Raises:
            RecordError: The text is truncated, foreign, or of a newer schema.
        """
        return from_json(cls.KIND, cls, text)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: The file cannot be read, or holds no such record.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read record {path}: {error}.") from error
        return cls.from_json(text)


def to_json(kind: str, record: Any) -> str:
    """A record as JSON text, its kind and schema in front."""
    body = {"schema": SCHEMA, "kind": kind, **_plain(asdict(record))}
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def from_json(kind: str, cls: type[RecordT], text: str) -> RecordT:
    """Read a record.

    Raises:
        RecordError: The text is truncated, foreign, or of a newer schema.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole record: {_brief(error)}.") from error
    if not isinstance(body, dict) or body.get("kind") != kind:
        raise RecordError(f"not a {kind} record of graphkit.")
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(
            f"record has schema {schema!r}, this graphkit reads up to {SCHEMA}. Upgrade graphkit."
        )
    record: RecordT = _value(cls, body, kind)
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, odd in _ODD.items() if repr(odd) == repr(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _value(declared: Any, value: Any, where: str) -> Any:
    """The value as its declared type.

    Raises:
        RecordError: It is of another one; ``where`` is in the text.
    """
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _value(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if is_dataclass(declared) and isinstance(value, dict):
        return _record(declared, value, where)
    if declared is float and type(value) in (int, float):
        return float(value)
    if declared is float and isinstance(value, str) and value in _ODD:
        return _ODD[value]
    if isinstance(declared, type) and type(value) is declared:
        return value
    raise RecordError(f"not a whole record: {where} is {_shown(value)}.")


def _one_of(declared: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in declared:
        return None
    for each in declared:
        try:
            return _value(each, value, where)
        except RecordError:
            continue
    raise RecordError(f"not a whole record: {where} is {_shown(value)}.")


def _record(cls: Any, body: dict[str, Any], where: str) -> Any:
    """A dataclass; fields that it does not know are a later release's and passed over."""
    hints, facts = get_type_hints(cls), {}
    for field in fields(cls):
        if field.name in body:
            facts[field.name] = _value(hints[field.name], body[field.name], f"{where}.{field.name}")
        elif field.default is MISSING:
            raise RecordError(f"not a whole record: {where}.{field.name} is missing.")
    return cls(**facts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(". ")
