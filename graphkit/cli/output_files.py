"""Output files: checked before the work starts, and written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from graphkit.cli.exit_codes import UsageError
from graphkit.cli.output import print_message


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
    for each in needed:
        if not os.access(each, os.W_OK):
            raise UsageError(
                f"cannot write {path}: no permission to write {each}. Choose a different file."
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
