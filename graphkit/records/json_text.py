"""Frozen dataclasses as JSON text, and back with every value checked against its declared type.

NaN and infinities, which JSON lacks, are written as text. A dataclass with a true ``SPARSE`` occurs
many times: it is written on one line, without the fields that have their default value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from graphkit.errors import RecordError
from graphkit.records.json_readers import (
    NON_FINITE,
    InvalidValueError,
    fields_of,
    reader_of,
    shortened_repr,
)

SCHEMA = 3
"""Incremented when an older reader could misread a record."""

_KINDS: dict[str, type[Record]] = {}
_R = TypeVar("_R", bound="Record")


class Record:
    """Base of dataclasses that are saved as one JSON text, which names their kind."""

    __slots__ = ()
    KIND: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Register the kind for ``load_record``."""
        _KINDS[cls.KIND] = cls  # dataclass(slots=True) creates each class twice; the last one stays

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return _encode({"schema": SCHEMA, "kind": self.KIND, **_field_values(self)}, "\n") + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record from JSON text.

        Raises:
            RecordError: The text is truncated, of a different format, or of a newer schema.
        """
        body = _parse(text)
        if body["kind"] != cls.KIND:
            kind = shortened_repr(body["kind"])
            raise RecordError(f"not a {cls.KIND} record of graphkit: its kind is {kind}.")
        record: Self = _decode(cls, body)
        return record

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: The file cannot be read or holds no such record; the message names it.
        """
        return _load(path, cls.from_json)


def load_record(path: str | Path) -> Record:
    """Read a record of any kind from a file.

    Raises:
        RecordError: The file cannot be read or holds no record; the message names it.
    """
    return _load(path, _from_json)


def _load(path: str | Path, read: Callable[[str], _R]) -> _R:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error  # strerror does not repeat the path
        if isinstance(error, IsADirectoryError):
            reason = "it is a folder. Name the file of a saved record"
        raise RecordError(f"cannot read record {path}: {reason}.") from error
    try:
        return read(text)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _from_json(text: str) -> Record:
    body = _parse(text)
    if body["kind"] not in _KINDS:
        raise RecordError(f"no record of graphkit: its kind is {shortened_repr(body['kind'])}.")
    record: Record = _decode(_KINDS[body["kind"]], body)
    return record


def _parse(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole record: {_first_line(error)}.") from error
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise RecordError("not a record of graphkit.")
    return body


def _decode(cls: type[Record], body: dict[str, Any]) -> Any:
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(
            f"record has schema {shortened_repr(schema)}, this graphkit reads up to {SCHEMA}. "
            "Upgrade graphkit."
        )
    try:
        return reader_of(cls)(_upgrade(body))
    except InvalidValueError as invalid:
        path = "".join([cls.KIND, *reversed(invalid.where)])
        expected = f"; expected {invalid.expected}" if invalid.expected else ""
        raise RecordError(f"not a whole record: {path} is {invalid.value}{expected}.") from None


def _upgrade(body: dict[str, Any]) -> dict[str, Any]:
    """Rename the fields of schema 1 as in schema 2."""
    if body["schema"] == 1 and isinstance(body.get("modes"), list):
        for mode in body["modes"]:
            if isinstance(mode, dict) and "stays_eager" in mode:
                mode["eager_reason"] = mode.pop("stays_eager")
    return body


def _field_values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields_of(type(record))}


def _encode(value: Any, newline: str) -> str:
    """Return a value as JSON; ``newline`` starts a line at the value's depth."""
    if is_dataclass(value):
        if getattr(value, "SPARSE", False):
            return json.dumps(_sparse(value), allow_nan=False, separators=(",", ":"))
        value = _field_values(value)
    deeper = newline + "  "
    if isinstance(value, Mapping) and value:
        items = (f"{json.dumps(str(key))}: {_encode(each, deeper)}" for key, each in value.items())
        return "{" + deeper + ("," + deeper).join(items) + newline + "}"
    if isinstance(value, (list, tuple)) and value:
        return "[" + deeper + ("," + deeper).join(_encode(v, deeper) for v in value) + newline + "]"
    return json.dumps(_finite_or_text(value), allow_nan=False)


def _sparse(value: Any) -> Any:
    """Return a value as ``json`` writes it, without the fields that have their default value."""
    if is_dataclass(value):
        values = ((field, getattr(value, field.name)) for field in fields_of(type(value)))
        return {f.name: _sparse(each) for f, each in values if each != _default(f)}
    if isinstance(value, Mapping):
        return {str(key): _sparse(each) for key, each in value.items()}
    return [_sparse(each) for each in value] if isinstance(value, tuple) else _finite_or_text(value)


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, each in NON_FINITE.items() if repr(each) == repr(value))
    return value


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(". ")
