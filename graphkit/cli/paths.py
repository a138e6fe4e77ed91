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


def module_name(path: Path) -> str:
    """Return the name by which the working directory imports a file in it; else its own name."""
    path = path.absolute()
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return ".".join(inside.with_suffix("").parts)
