"""Output files: refused early, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from graphkit.cli.exits import UsageError


def check_writable(path: Path) -> None:
    """Refuse an output before the work for it is done.

    Raises:
        UsageError: The folder is missing or closed, or the path is a folder.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Name a file.")
    needed = [path] if path.exists() else []
    if _is_file(path):
        folder = _without_link(path).parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {path}: folder {folder} does not exist. Make it.")
        needed.append(folder)
    for place in needed:
        if not os.access(place, os.W_OK):
            raise UsageError(
                f"cannot write {path}: no permission to write {place}. Choose another file."
            )


def write_whole(path: Path, text: str) -> None:
    """Write a file by way of another one beside it; a pipe or a device is written directly.

    Raises:
        UsageError: The system refuses; nothing is left behind.
    """
    try:
        if _is_file(path):
            _replace(_without_link(path), text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error


def _replace(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _is_file(path: Path) -> bool:
    """Whether it is a file, or is to become one: neither a pipe nor a device."""
    return path.is_file() or not path.exists()


def _without_link(path: Path) -> Path:
    """What a link leads to, since a link is not to be replaced: it may be ``/dev/stdout``."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
