"""Frozen dataclasses to JSON text and back, every value checked against its declared type.

Not-a-number and the infinities, which JSON lacks, travel as text. A dataclass whose ``SPARSE`` is
true is one of many: it is written on a line of its own, without the fields that are as declared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from graphkit.errors import RecordError
from graphkit.records.json_readers import ODD, MisfitError, fields_of, reader_of, shown

SCHEMA = 2
"""Counts changes that an older reader could misread."""

_KINDS: dict[str, type[Record]] = {}
_R = TypeVar("_R", bound="Record")


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
        if body["kind"] != cls.KIND:
            raise RecordError(
                f"not a {cls.KIND} record of graphkit: its kind is {shown(body['kind'])}."
            )
        record: Self = _read(cls, body)
        return record

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: The file, which it names, cannot be read, or holds no such record.
        """
        return _from_file(path, cls.from_json)


def load_record(path: str | Path) -> Record:
    """Read a record of any kind from a file.

    Raises:
        RecordError: The file, which it names, cannot be read, or holds no record.
    """
    return _from_file(path, _of_any_kind)


def _from_file(path: str | Path, read: Callable[[str], _R]) -> _R:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the path once more
        raise RecordError(f"cannot read record {path}: {why}.") from error
    try:
        return read(text)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _of_any_kind(text: str) -> Record:
    body = _body(text)
    if body["kind"] not in _KINDS:
        raise RecordError(f"no record of graphkit: its kind is {shown(body['kind'])}.")
    record: Record = _read(_KINDS[body["kind"]], body)
    return record


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole record: {_brief(error)}.") from error
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise RecordError("not a record of graphkit.")
    return body


def _upgraded(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body of schema 1 with the field names of schema 2."""
    if body["schema"] == 1 and isinstance(body.get("modes"), list):
        for mode in body["modes"]:
            if isinstance(mode, dict) and "stays_eager" in mode:
                mode["eager_reason"] = mode.pop("stays_eager")
    return body


def _read(cls: type[Record], body: dict[str, Any]) -> Any:
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(
            f"record has schema {shown(schema)}, this graphkit reads up to {SCHEMA}. "
            "Upgrade graphkit."
        )
    try:
        return reader_of(cls)(_upgraded(body))
    except MisfitError as misfit:
        where = "".join([cls.KIND, *reversed(misfit.where)])
        raise RecordError(f"not a whole record: {where} is {misfit.what}.") from None


def _facts(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields_of(type(record))}


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
        facts = ((field, getattr(value, field.name)) for field in fields_of(type(value)))
        return {f.name: _sparse(fact) for f, fact in facts if fact != _default(f)}
    if isinstance(value, Mapping):
        return {str(key): _sparse(each) for key, each in value.items()}
    return [_sparse(each) for each in value] if isinstance(value, tuple) else _number(value)


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, odd in ODD.items() if repr(odd) == repr(value))
    return value


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(". ")
