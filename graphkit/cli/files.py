"""Output files: refused early, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
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
    """Write a file by way of a temporary one beside it.

    Raises:
        UsageError: The system refuses; nothing is left behind.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error
