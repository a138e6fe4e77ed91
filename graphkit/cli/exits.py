"""How a command ends: exit codes, the errors that lead to them, and signals as exceptions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from graphkit.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    GraphkitError,
    RecordError,
    TargetError,
    error_text,
)

DONE, FAILED, USAGE, NO_DEVICE = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143
"""128 plus the number of SIGINT and of SIGTERM, as a shell reports them."""


class UsageError(GraphkitError):
    """The arguments of a command contradict each other or name a file that cannot be used."""


def describe(error: Exception) -> str:
    """Return an error as one line for the terminal."""
    if isinstance(error, GraphkitError):
        return " ".join(map(str.strip, str(error).splitlines()))
    return f"{error_text(error)}. Run graphkit -v to see the traceback."


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, DeviceError):
        return NO_DEVICE
    wrong_use = UsageError, TargetError, ConfigError, CheckpointError, RecordError
    return USAGE if isinstance(error, wrong_use) else FAILED


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Code that handles Ctrl-C handles it the same way."""


_EXCEPTIONS: dict[int, type[KeyboardInterrupt]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
}


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on SIGINT and ``Terminated`` on SIGTERM in the block.

    The terminal's cursor is then restored and temporary files are removed, which the default action
    of SIGTERM would not do.
    """
    owner = os.getpid()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner or number == signal.SIGINT:
            raise _EXCEPTIONS[number]
        # A forked child keeps the default action, which its parent expects of it.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with _handler(on_signal):
        yield


@contextmanager
def signals_as_exit(leave: Callable[[], None]) -> Iterator[None]:
    """End an event loop by ``leave`` on SIGINT or SIGTERM, and raise the exception after the block.

    A callback of the loop could lose an exception that a signal handler raises in it. A second
    signal raises at once.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        import asyncio

        received.append(number)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the loop has not started
            raise _EXCEPTIONS[number] from None
        if len(received) > 1:
            raise _EXCEPTIONS[number]
        loop.call_soon_threadsafe(leave)

    with _handler(on_signal):
        yield
    if received:
        raise _EXCEPTIONS[received[0]]


@contextmanager
def _handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle both signals in the block, except an ignored one.

    Has no effect outside the main thread, where Python sets no handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _EXCEPTIONS if is_main}
    replaced = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)
