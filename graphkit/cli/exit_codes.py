"""Exit codes, and the errors that lead to them."""

from __future__ import annotations

from graphkit.errors import ConfigError, DeviceError, GraphkitError, TargetError

DONE, FAILED, USAGE, NO_DEVICE = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143
"""128 plus the number of SIGINT and of SIGTERM, as a shell reports them."""


class UsageError(GraphkitError):
    """The arguments of a command contradict each other or name a file that cannot be used."""


def describe(error: Exception) -> str:
    """Return an error as one line for the terminal."""
    if isinstance(error, GraphkitError):
        return str(error)
    first_line = str(error).partition("\n")[0].rstrip(".")
    summary = f"{type(error).__name__}: {first_line}".rstrip(": ")
    return f"{summary}. Run graphkit -v to see the traceback."


def exit_code_of(error: Exception) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, DeviceError):
        return NO_DEVICE
    return USAGE if isinstance(error, (UsageError, TargetError, ConfigError)) else FAILED
