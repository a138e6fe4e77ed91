"""Every error that graphkit raises for a caller's mistake.

The tree::

    GraphkitError
    ├── ConfigError       a setting contradicts itself or the device
    ├── InputError        a field of a batch cannot be taken
    ├── SizeError         no captured size fits a batch
    ├── OutputError       a forward returned what its mode does not return
    ├── CaptureError      a forward cannot be captured
    ├── ReplayError       a runner is not in the state that the call needs
    ├── AttentionError    an attention backend or a KV pool was misused
    ├── TargetError       a TARGET cannot be found or is not one
    ├── CheckpointError   a checkpoint folder cannot be read
    ├── InspectError      a graph cannot be looked into
    ├── RecordError       a saved record cannot be read
    └── DeviceError       no usable device

Each keeps its facts as attributes, so that nobody has to parse its text.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class GraphkitError(Exception):
    """What all errors of this package share. Can be copied and pickled, facts included."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[GraphkitError], args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


class ConfigError(GraphkitError, ValueError):
    """A setting is refused; ``field`` names it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputError(GraphkitError, ValueError):
    """A field of a batch is missing or has the wrong shape, dtype or device; ``field`` names it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SizeError(GraphkitError, ValueError):
    """No captured size fits; ``batch_size`` came and ``largest`` was allowed."""

    def __init__(self, message: str, *, batch_size: int, largest: int) -> None:
        super().__init__(message)
        self.batch_size = batch_size
        self.largest = largest


class OutputError(GraphkitError, TypeError):
    """A forward returned what its mode does not return, or too few rows of it."""


class CaptureCause(Enum):
    """Why a capture failed. The value is the advice for that cause alone."""

    OUT_OF_MEMORY = "Capture fewer or smaller batch_sizes, or free device memory first."
    HOST_SYNCHRONISATION = (
        "Keep the value on the device: use tensor arithmetic, torch.where or an upper bound."
    )
    DATA_DEPENDENT_SHAPE = (
        "Give the result a static shape: use torch.where or a mask instead of selecting rows."
    )
    UNSUPPORTED_OP = "Replace the operation by one that may run inside a CUDA graph."
    FORWARD_ERROR = "Correct this, then call capture() again."
    GRAPHKIT_ERROR = (
        "Check the settings and arguments that led to it; if they are valid, report a defect of "
        "graphkit."
    )

    @property
    def label(self) -> str:
        """The cause in plain words, such as ``host synchronisation``."""
        return self.name.lower().replace("_", " ")

    def describe(self, where: str) -> str:
        """Return the cause and its location as one phrase."""
        says_all = self in (CaptureCause.FORWARD_ERROR, CaptureCause.GRAPHKIT_ERROR)
        return where if says_all else f"{self.label} in {where}"


class CaptureError(GraphkitError, RuntimeError):
    """A forward cannot be captured.

    Attributes:
        mode: The forward mode's name.
        batch_size: The size whose capture failed.
        cause: Its class.
        where: The operation and the user's line that failed; for an exception of another kind, the
            line, the module and the exception.
    """

    def __init__(self, mode: str, batch_size: int, cause: CaptureCause, where: str) -> None:
        what = cause.describe(where).rstrip(".")
        super().__init__(f"cannot capture {mode} at batch size {batch_size}: {what}. {cause.value}")
        self.mode = mode
        self.batch_size = batch_size
        self.cause = cause
        self.where = where


class ReplayError(GraphkitError, RuntimeError):
    """A runner or a staged slot is not in the state that the call needs."""


class AttentionError(GraphkitError, ValueError):
    """An attention backend or a KV pool was given what it does not take."""


class TargetError(GraphkitError, ValueError):
    """A TARGET cannot be imported, or is not a CaptureTarget."""


class CheckpointError(GraphkitError, ValueError):
    """A checkpoint folder lacks a file or a tensor, or holds what is not supported."""


class InspectError(GraphkitError, RuntimeError):
    """A graph cannot be looked into: its template was not kept, or the bindings are missing."""


class RecordError(GraphkitError, ValueError):
    """A saved record is truncated, foreign or of a newer schema."""


class DeviceError(GraphkitError, RuntimeError):
    """No usable device."""
