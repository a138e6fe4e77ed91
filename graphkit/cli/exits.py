"""Exit codes, and which error leads to which."""

from __future__ import annotations

from graphkit.errors import ConfigError, DeviceError, GraphkitError, TargetError

DONE, FAILED, USAGE, NO_DEVICE = 0, 1, 2, 3


class UsageError(GraphkitError):
    """The words of a command contradict the machine, such as an output that cannot be written."""


def exit_code_of(error: Exception) -> int:
    """The exit code that an error ends a command with."""
    if isinstance(error, DeviceError):
        return NO_DEVICE
    return USAGE if isinstance(error, (UsageError, TargetError, ConfigError)) else FAILED
