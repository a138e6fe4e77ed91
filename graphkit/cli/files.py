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
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: folder {path.parent} does not exist. Make it.")
    closed = path if path.exists() else path.parent
    if not os.access(closed, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission. Choose another --out.")


def write_whole(path: Path, text: str) -> None:
    """Write a file by way of another one beside it; a pipe or a device is written directly.

    Raises:
        UsageError: The system refuses; nothing is left behind.
    """
    is_file = path.is_file() or not path.exists()
    beside = path.with_name(f".{path.name}.{os.getpid()}") if is_file else path
    try:
        beside.write_text(text, encoding="utf-8")
        if is_file:
            beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        if is_file:
            beside.unlink(missing_ok=True)
