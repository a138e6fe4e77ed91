"""Where a command's words go: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from graphkit.cli.exits import UsageError

_PIPE_WIDTH = 120


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is there, and a terminal."""
    return stream is not None and stream.isatty()


def show(result: RenderableType) -> None:
    """Print a command's result. Text is printed as it is.

    Raises:
        UsageError: As for ``write``.
    """
    width = None if is_terminal(sys.stdout) else _PIPE_WIDTH
    write(result if isinstance(result, str) else _drawn(result, Console(width=width)))


def write(text: str) -> None:
    """Write to stdout at once. A reader who left, as ``head`` does, has seen enough.

    Raises:
        UsageError: The system refuses, as for a full disk, or stdout is closed.
    """
    if sys.stdout is None:
        raise UsageError("cannot write to stdout: it is closed.")
    try:
        _put(text, sys.stdout)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UsageError(f"cannot write to stdout: {error.strerror}.") from error


def note(what: RenderableType) -> None:
    """Print something that is not the result; where nobody listens it is lost."""
    text = f"{what}\n" if isinstance(what, str) else _drawn(what, Console(stderr=True))
    if sys.stderr is not None:
        with suppress(OSError):
            _put(text, sys.stderr)


def _drawn(result: RenderableType, console: Console) -> str:
    with console.capture() as captured:
        console.print(result)
    return captured.get()


def _put(text: str, stream: TextIO) -> None:
    """Write at once; characters that the stream's encoding lacks are written as escapes."""
    encoding = stream.encoding
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        # What is left in the buffer would be written once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the time left while the block runs; call it with done, total and what."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
