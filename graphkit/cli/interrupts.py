"""SIGINT and SIGTERM as exceptions, so that an ending command restores what it changed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Code that handles Ctrl-C handles it the same way."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on SIGINT and ``Terminated`` on SIGTERM in the block.

    The terminal's cursor and mode are then restored and temporary files removed, which the default
    action of SIGTERM would not do. Signals that are ignored or handled already stay so. Has no
    effect outside the main thread, where Python sets no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise Terminated
        # A forked child keeps the default action, which its parent expects of it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    # asyncio replaces Python's own SIGINT handler, and the screen would then end with exit code 0.
    with (
        _replaced(signal.SIGINT, signal.default_int_handler, interrupt),
        _replaced(signal.SIGTERM, signal.SIG_DFL, terminate),
    ):
        yield


@contextmanager
def _replaced(number: signal.Signals, default: _Handler, handler: _Handler) -> Iterator[None]:
    """Replace a signal's default handler in the block; leave any other handler."""
    if signal.getsignal(number) is not default:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, default)
