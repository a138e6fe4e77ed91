"""The exceptions that graphkit raises for mistakes of its caller.

The hierarchy::

    GraphkitError
    ├── ConfigError       a setting is invalid, or contradicts another setting or the device
    ├── InputError        a field of a batch is missing or invalid
    ├── SizeError         a batch is larger than every captured size
    ├── OutputError       a forward returned an invalid output
    ├── CaptureError      a forward cannot be captured
    ├── ReplayError       a runner is not in the state that a call requires
    │   ├── QueueFullError  so many requests wait that an engine takes no more
    │   └── RankError     another rank failed, left, or does something else
    ├── AttentionError    an attention backend or a KV pool got invalid arguments
    ├── TargetError       a TARGET cannot be imported or is invalid
    ├── CheckpointError   a checkpoint folder cannot be loaded
    ├── InspectError      a graph cannot be inspected
    ├── RecordError       a saved record cannot be read
    └── DeviceError       there is no usable device

Details are attributes of the exception, so that callers need not parse its message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any


class GraphkitError(Exception):
    """Base class of all exceptions of graphkit; can be copied and pickled with its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception, without a full stop."""
    return next(iter(str(error).splitlines()), "").rstrip(". ")


def error_text(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def short_repr(value: object, limit: int = 160) -> str:
    """Return a value as text for a message: its ``repr`` on one line, cut to about ``limit``.

    Of a collection the first items are shown, and of a tensor of many numbers dtype and shape. An
    object whose ``repr`` fails is named by its type.
    """
    kind = type(value)
    if limit < 8:
        return "..."
    if kind in _BRACKETS:
        return _items_text(value, limit)
    if is_dataclass(kind) and "__repr__" in kind.__dict__ and kind.__module__ != "builtins":
        shown = (f.name for f in fields(kind) if f.repr and hasattr(value, f.name))
        named = (f"{name}={short_repr(getattr(value, name), limit // 2)}" for name in shown)
        return f"{kind.__qualname__}({_joined(named, limit)})"
    try:
        if kind.__module__.partition(".")[0] in ("torch", "numpy"):
            shape = getattr(value, "shape", None)
            if isinstance(shape, tuple) and prod(shape) > _MAX_NUMBERS:
                dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
                return f"{kind.__name__} of {dtype} {[*shape]}"
        text = " ".join(repr(value).split())
    except Exception:  # of the value
        return f"<{kind.__name__}>"
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]}...{text[-limit // 4 :]}"


_MAX_NUMBERS = 4
_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", dict: "{}"}


def _items_text(value: Any, limit: int) -> str:
    """Return the first items of a collection, and their number if some are left out."""
    if type(value) is dict:
        parts = (
            f"{short_repr(key, limit // 2)}: {short_repr(item, limit // 2)}"
            for key, item in value.items()
        )
    else:
        parts = (short_repr(item, limit // 2) for item in value)
    if not value:
        return repr(value)
    text = _joined(parts, limit)
    if text.endswith("..."):
        text += f" {len(value)} items"
    elif type(value) is tuple and len(value) == 1:
        text += ","
    brackets = _BRACKETS[type(value)]
    return f"{brackets[0]}{text}{brackets[1]}"


def _joined(parts: Iterator[str], limit: int) -> str:
    """Return parts with commas, and ``...`` in place of those beyond a length."""
    shown: list[str] = []
    length = 0
    for part in parts:
        length += len(part) + 2
        if length > limit and shown:
            shown.append("...")
            break
        shown.append(part)
    return ", ".join(shown)


def _restored(cls: type[GraphkitError], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(GraphkitError, ValueError):
    """A setting is invalid.

    Attributes:
        field: The name of the setting; ``None`` if no single setting is at fault.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputError(GraphkitError, ValueError):
    """A field of a batch is missing, or has the wrong shape, dtype, device or value.

    Attributes:
        field: The name of the field; ``None`` if no single field is at fault.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SizeError(GraphkitError, ValueError):
    """A batch is larger than every captured size.

    Attributes:
        batch_size: Requests in the batch.
        largest: Largest captured size, in requests.
    """

    def __init__(self, message: str, *, batch_size: int, largest: int) -> None:
        super().__init__(message)
        self.batch_size = batch_size
        self.largest = largest


class OutputError(GraphkitError, TypeError):
    """A forward returned a type that its mode does not allow, or the wrong number of rows."""


class CaptureCause(Enum):
    """Cause of a failed capture; the value is the usual advice for it."""

    OUT_OF_MEMORY = "Capture fewer or smaller batch_sizes, or free device memory first."
    HOST_SYNCHRONISATION = (
        "Keep the value on the device: use tensor arithmetic, torch.where or an upper bound."
    )
    DATA_DEPENDENT_SHAPE = (
        "Give the result a static shape: use torch.where or a mask instead of selecting rows."
    )
    UNSUPPORTED_OP = "Replace the operation by one that may run inside a CUDA graph."
    MISSING_RANK = "Look at what that rank does: every rank must make the same calls in order."
    FORWARD_ERROR = "Correct this, then call capture() again."
    GRAPHKIT_ERROR = (
        "Check the settings and arguments that led to it; if they are valid, report a defect of "
        "graphkit."
    )

    @property
    def label(self) -> str:
        """Name of the cause in words, such as ``host synchronisation``."""
        return self.name.lower().replace("_", " ")

    def describe(self, where: str) -> str:
        """Return the cause and its location as one phrase.

        An exception of the forward or of graphkit names its cause itself, as a missing rank does.
        """
        is_whole = self in (
            CaptureCause.FORWARD_ERROR, CaptureCause.GRAPHKIT_ERROR, CaptureCause.MISSING_RANK,
        )  # fmt: skip
        return where if is_whole else f"{self.label} in {where}"


class CaptureError(GraphkitError, RuntimeError):
    """A forward cannot be captured.

    Attributes:
        mode: Name of the forward mode.
        batch_size: Size whose capture failed, in requests.
        cause: Why the capture failed.
        where: The operation that failed and its line of the forward; for an exception, its line,
            module, type and message.
        rank: The rank that failed, if ranks capture together; every rank raises this error.

    The message ends with ``advice``, or with the usual one for the cause.
    """

    def __init__(
        self,
        mode: str,
        batch_size: int,
        cause: CaptureCause,
        where: str,
        rank: int | None = None,
        advice: str = "",
    ) -> None:
        what = cause.describe(where).rstrip(".")
        place = f"{mode} at batch size {batch_size}{'' if rank is None else f' on rank {rank}'}"
        super().__init__(f"cannot capture {place}: {what}. {advice or cause.value}")
        self.mode = mode
        self.batch_size = batch_size
        self.cause = cause
        self.where = where
        self.rank = rank


class ReplayError(GraphkitError, RuntimeError):
    """A runner or a staged batch is not in the state that a call requires."""


class QueueFullError(ReplayError):
    """As many requests wait as ``EngineThread.max_waiting`` allows. A server answers 503."""


class RankError(ReplayError):
    """Another rank of a ``RankGroup`` failed, left, or does something else than this one.

    Attributes:
        ranks: The ranks at fault, as far as they are known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class AttentionError(GraphkitError, ValueError):
    """An attention backend or a KV pool got arguments that it does not support."""


class TargetError(GraphkitError, ValueError):
    """A TARGET cannot be imported, is not a ``CaptureTarget``, or contradicts itself."""


class CheckpointError(GraphkitError, ValueError):
    """A checkpoint folder lacks a file or a tensor, or its model is not supported."""


class InspectError(GraphkitError, RuntimeError):
    """A graph cannot be inspected: its template was not kept, or cuda-bindings is missing."""


class RecordError(GraphkitError, ValueError):
    """A saved record is truncated, has a newer schema, or is not a record of graphkit."""


class DeviceError(GraphkitError, RuntimeError):
    """There is no usable device."""
