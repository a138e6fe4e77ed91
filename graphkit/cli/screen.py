"""Where a command's words go: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PIPE_WIDTH = 120


def show(result: RenderableType) -> None:
    """Print a command's result. Text is printed as it is."""
    if isinstance(result, str):
        sys.stdout.write(result)
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(width=width).print(result)


def note(text: str) -> None:
    """Print something that is not the result."""
    sys.stderr.write(f"{text}\n")


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
