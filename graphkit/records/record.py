"""Frozen dataclasses as JSON text, and back with the type and range of every value checked.

NaN and infinities, which JSON lacks, are written as text. A dataclass with a true ``SPARSE`` occurs
many times: it is written on one line, without the fields that have their default value. Lock files
hold hashes of this text: a change of its layout would invalidate them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from graphkit.errors import RecordError, error_text, short_repr

SCHEMA = 3
"""Incremented when an older reader could misread a record."""

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer of 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, an index or an address."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A time: finite and at least 0."""


class _Real(float):
    """A float that msgspec reads through ``_read_real``; it has no hook for a plain float."""

    __slots__ = ()


if TYPE_CHECKING:
    Real = float
else:
    Real = Annotated[_Real, "a number, NaN and infinities included"]

_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_fields: Callable[[Any], tuple[Field[Any], ...]] = cache(fields)
_KINDS: dict[str, type[Record]] = {}
_R = TypeVar("_R", bound="Record")


class Record:
    """Base of dataclasses that are saved as one JSON text, which names their kind.

    Records, and the dataclasses in them, declare numbers as ``Integer``, ``Count``, ``Duration`` or
    ``Real``, whose range is checked, instead of ``int`` and ``float``.
    """

    __slots__ = ()
    KIND: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Register the kind for ``load_record``."""
        _KINDS[cls.KIND] = cls  # dataclass(slots=True) creates each class twice; the last one stays

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return _encode({"schema": SCHEMA, "kind": self.KIND, **_values(self)}, "\n") + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record from JSON text.

        Raises:
            RecordError: The text is truncated, of a different format, or of a newer schema.
        """
        body = _parse(text)
        kind = record_kinds().get(body["kind"])
        if kind is None or not issubclass(kind, cls):
            wanted = "no" if cls is Record else f"not a {cls.KIND}"
            raise RecordError(
                f"{wanted} record of graphkit: its kind is {short_repr(body['kind'], 40)}."
            )
        return _decode(kind, body)

    def check_contents(self) -> None:
        """Refuse values that contradict each other; called when a record is read.

        Raises:
            RecordError: Names the first such value by its path.
        """

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: The file cannot be read or holds no such record; the message names it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error  # strerror does not repeat the path
            if isinstance(error, IsADirectoryError):
                reason = "it is a folder. Name the file of a saved record"
            raise RecordError(f"cannot read record {path}: {reason}.") from error
        try:
            return cls.from_json(text)
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error


def load_record(path: str | Path) -> Record:
    """Read a record of any kind from a file.

    Raises:
        RecordError: The file cannot be read or holds no record; the message names it.
    """
    return Record.load(path)


@cache
def record_kinds() -> Mapping[str, type[Record]]:
    """Return the classes of records by kind. Loads their modules, which names load on first use."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"graphkit.records.{module.name}")
    return _KINDS


def _parse(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole record: {error_text(error)}.") from error
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise RecordError("not a record of graphkit.")
    return body


def _decode(cls: type[_R], body: dict[str, Any]) -> _R:
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise RecordError(
            f"record has schema {short_repr(schema, 40)}, this graphkit reads up to {SCHEMA}. "
            "Upgrade graphkit."
        )
    if schema == 1:
        _rename_fields_of_schema_1(body)
    try:
        record = msgspec.convert(body, cls, dec_hook=_read_real, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        place = path.replace("`", "").replace("$", cls.KIND) or cls.KIND
        problem = problem[0].lower() + problem[1:]
        raise RecordError(f"not a whole record: {place}: {problem}.") from None
    except UnicodeEncodeError:  # msgspec reads a text as a number through UTF-8
        raise RecordError(
            f"not a whole record: {cls.KIND}: a text with an unpaired surrogate is in the place of "
            "another type."
        ) from None
    try:
        record.check_contents()
    except RecordError as error:
        raise RecordError(f"not a whole record: {cls.KIND}.{error}.") from None
    return record


def _rename_fields_of_schema_1(body: dict[str, Any]) -> None:
    for mode in body["modes"] if isinstance(body.get("modes"), list) else ():
        if isinstance(mode, dict) and "stays_eager" in mode:
            mode["eager_reason"] = mode.pop("stays_eager")


def _read_real(_declared: type, value: Any) -> _Real:
    """Return a value that is declared as ``Real``, the only type that msgspec does not know."""
    try:
        return _Real(value if value in _NON_FINITE else msgspec.convert(value, float))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None  # msgspec appends the path to a ValueError


def _encode(value: Any, newline: str) -> str:
    """Return a value as JSON; ``newline`` starts a line at the value's depth."""
    if is_dataclass(value):
        if getattr(value, "SPARSE", False):
            return json.dumps(_sparse(value), allow_nan=False, separators=(",", ":"))
        value = _values(value)
    deeper = newline + "  "
    if isinstance(value, Mapping) and value:
        items = (f"{json.dumps(str(key))}: {_encode(item, deeper)}" for key, item in value.items())
        return "{" + deeper + ("," + deeper).join(items) + newline + "}"
    if isinstance(value, (list, tuple)) and value:
        return "[" + deeper + ("," + deeper).join(_encode(v, deeper) for v in value) + newline + "]"
    return json.dumps(_finite_or_text(value), allow_nan=False)


def _sparse(value: Any) -> Any:
    """Return a value as ``json`` writes it, without the fields that have their default value."""
    if is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in _fields(type(value)))
        return {field.name: _sparse(item) for field, item in items if item != _default(field)}
    if isinstance(value, Mapping):
        return {str(key): _sparse(item) for key, item in value.items()}
    return [_sparse(item) for item in value] if isinstance(value, tuple) else _finite_or_text(value)


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in _fields(type(record))}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # one of _NON_FINITE
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Device and versions with which a record was made; empty where one is missing."""

    device: str
    torch: str
    triton: str
    cuda: str
    driver: str
    graphkit: str
