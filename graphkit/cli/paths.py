"""Paths given as arguments. ``pathlib`` raises for names that no file can have."""

from __future__ import annotations

from pathlib import Path


def exists(path: Path) -> bool:
    """Return True if the path names something that can be found."""
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def is_folder(path: Path) -> bool:
    """Return True if the path names a folder that can be found."""
    return exists(path) and path.is_dir()
