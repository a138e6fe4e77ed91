"""What a command writes: results to stdout, messages and progress to stderr, and files."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from graphkit.cli.exits import UsageError

_PIPE_WIDTH = 120
_SECONDS = 10.0
"""Time between two lines of progress without a terminal."""
_silent = False


def silence() -> None:
    """Print nothing from now on: another process of the command prints."""
    global _silent
    _silent = True


def is_terminal(stream: TextIO | None) -> bool:
    """Return True for an open stream that is a terminal."""
    return stream is not None and stream.isatty()


def print_result(result: RenderableType, *, has_styles: bool = True) -> None:
    """Print the result of a command to stdout; a string is printed unchanged.

    Without ``has_styles``, neither colours nor bold text are printed.

    Raises:
        UsageError: As for ``write_stdout``.
    """
    width = None if is_terminal(sys.stdout) else _PIPE_WIDTH
    console = Console(width=width, color_system="auto" if has_styles else None)
    text = result if isinstance(result, str) else _render(result, console)
    write_stdout(text)


def write_stdout(text: str) -> None:
    """Write to stdout and flush. A reader that closed the pipe, as ``head`` does, is not an error.

    Raises:
        UsageError: stdout is closed, or the system refuses the write, for example on a full disk.
    """
    if _silent:
        return
    if sys.stdout is None:
        raise UsageError("cannot write to stdout: it is closed.")
    try:
        _write(text, sys.stdout)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UsageError(f"cannot write to stdout: {error.strerror}.") from error


def print_message(message: RenderableType, *, starts_line: bool = False) -> None:
    """Print to stderr, on a terminal after the end of the present line if ``starts_line``.

    The message is dropped if stderr is closed.
    """
    if sys.stderr is None or _silent:
        return
    is_text = isinstance(message, str)
    text = f"{message}\n" if is_text else _render(message, Console(stderr=True))
    with suppress(OSError):
        _write(f"\n{text}" if starts_line and is_terminal(sys.stderr) else text, sys.stderr)


@contextmanager
def log_to_stderr(verbosity: int) -> Iterator[None]:
    """Print what the logger ``graphkit`` receives in the block, a line per entry.

    Verbosity 0 prints warnings and errors, 1 also what is of interest, 2 everything.
    """
    logger, handler = logging.getLogger("graphkit"), _MessageHandler()
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    handler.setLevel(level)
    logger.addHandler(handler)
    try:
        with at_level("graphkit", level if verbosity else logger.level):
            yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Drop what the logger ``name`` receives in the block below a level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class _MessageHandler(logging.Handler):
    """Prints entries as ``warning: text``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print an entry."""
        try:
            print_message(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:  # wrong arguments of a message must not end the command
            self.handleError(record)


def _render(result: RenderableType, console: Console) -> str:
    """Return a result as text; outside of terminals without spaces that end lines."""
    with console.capture() as captured:
        console.print(result)
    text = captured.get()
    return text if console.is_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE)


def _write(text: str, stream: TextIO) -> None:
    """Write and flush; characters that the stream's encoding lacks are written as escapes."""
    encoding = stream.encoding or "utf-8"  # a StringIO, as of redirect_stdout, has none
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        # The interpreter would write what is left in the buffer once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[int, int, str], None]]:
    """Show progress on stderr while the block runs: a bar on a terminal, else a line now and then.

    Yields:
        A function to call with the steps done, all steps, and a description of the present one.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    if not is_terminal(sys.stderr):
        with _progress_lines() as advance_lines:
            yield advance_lines
        return
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=_silent or not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, description: str) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield advance


@contextmanager
def _progress_lines() -> Iterator[Callable[[int, int, str], None]]:
    """Print a line about the present step every ``_SECONDS``, as a log of CI shows them.

    Without a terminal, the progress of rich prints nothing before its end.

    Steps that take long, such as a compilation, are printed again: a thread prints.
    """
    present: list[str] = []
    has_ended = threading.Event()

    def advance(done: int, total: int, description: str) -> None:
        present[:] = [f"{description} ({done} of {total} done)"]

    def print_lines() -> None:
        while not has_ended.wait(_SECONDS):
            for line in present:
                print_message(line)

    thread = threading.Thread(target=print_lines, name="graphkit progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        has_ended.set()
        thread.join()


def check_writable(path: Path) -> None:
    """Check that an output file can be written.

    Raises:
        UsageError: The path is a folder, its folder does not exist, permission is missing, or no
            file can have this name.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {path}: {reason}.") from error
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Name a file.")
    needed = [path] if path.exists() else []
    if _is_regular(path):
        folder = _resolve_link(path).parent
        if not folder.is_dir():
            raise UsageError(
                f"cannot write {path}: folder {folder} does not exist. Create the folder first."
            )
        needed.append(folder)
    for present in needed:
        if not os.access(present, os.W_OK):
            raise UsageError(
                f"cannot write {path}: no permission to write {present}. Choose a different file."
            )


def write_output(path: Path, text: str, summary: str = "") -> None:
    """Write an output file and name it on stderr, after a summary of its content if there is one.

    A regular file is replaced in one step; a pipe or a device is written directly.

    Raises:
        UsageError: The system refuses; nothing is left behind.
    """
    try:
        if _is_regular(path):
            _replace(_resolve_link(path), text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error
    print_message(f"{summary}: wrote {path}" if summary else f"wrote {path}")


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_regular(path: Path) -> bool:
    """Return True for a regular file and for a file that does not exist yet."""
    return path.is_file() or not path.exists()


def _resolve_link(path: Path) -> Path:
    """Return the file behind a link: the link itself, such as ``/dev/stdout``, must stay."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
