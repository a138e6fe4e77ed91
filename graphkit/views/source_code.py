"""The text of the line that made a node, from a file of this machine."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from pathlib import Path

_SOURCE = re.compile(r"(?P<path>[^:]+\.py):(?P<line>\d{1,7})(?: in (?P<function>.+))?")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceCode:
    """A line of a file and the lines around it, with their numbers, or why there are none."""

    path: str = ""
    lines: tuple[tuple[int, str], ...] = ()
    line: int = 0
    problem: str = ""


def source_code(source: str, around: int = 3) -> SourceCode:
    """Return the line that ``Node.source`` names and the lines around it; executes nothing.

    A record keeps the last folder and the name of a file alone. So the file is searched in the
    working folder, in the folders in it and in those of ``sys.path``, up to two levels below. It is
    used only if it is the one file of that name, at most 1 MiB large, in which the named function
    contains the line. The file may still differ from the one that was captured.
    """
    named = _SOURCE.fullmatch(source)
    if not named:
        return SourceCode(problem="no line of a Python file")
    line, function = int(named["line"]), named["function"] or "<module>"
    try:
        here = str(Path.cwd())
    except OSError:  # the working folder was removed
        here = sys.path[0]
    paths = _files(named["path"], (here, *sys.path))
    paths = tuple(path for path in paths if _has(path, line, function))
    if len(paths) != 1:
        problem = "several files match" if paths else "not on this machine, or changed since"
        return SourceCode(problem=problem)
    texts, first = _lines(paths[0]), max(line - around, 1)
    lines = tuple(enumerate(texts[first - 1 : line + around], first))
    return SourceCode(str(paths[0]), lines, line)


def source_line(source: str) -> str:
    """Return the line that ``Node.source`` names, with its number; empty if it is not found."""
    return next((f"{number}: {text.strip()}" for number, text in source_code(source, 0).lines), "")


def _has(path: Path, line: int, function: str) -> bool:
    """Return True if the file has the line, in the body of a function of that name."""
    if not 1 <= line <= len(_lines(path)):
        return False
    return function.startswith("<") or any(
        name == function and first <= line <= last for name, first, last in _bodies(path)
    )


@lru_cache(maxsize=64)
def _bodies(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, first and last line of the body of each function; none if it is not Python."""
    try:
        tree = ast.parse("\n".join(_lines(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    functions = (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return tuple((f.name, f.body[0].lineno, f.end_lineno or 0) for f in functions)


@lru_cache(maxsize=1024)
def _files(name: str, roots: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files of that name, with their last folder, in folders and two levels below."""
    parts = Path(name).parts
    if not 1 <= len(parts) <= 2 or ".." in parts or Path(name).is_absolute():
        return ()
    levels = ("", "[!.]*/", "[!.]*/[!.]*/") if len(parts) == 2 else ("",)
    found = dict[Path, None]()
    for at, root in enumerate(roots):  # the first one is the working folder
        for level in levels[: 2 if at else 3]:
            try:
                paths = Path(root).glob(level + escape(name))
                found |= dict.fromkeys(path.resolve() for path in paths)
            except (OSError, ValueError):  # a folder that cannot be read, or was removed
                continue
    return tuple(path for path in found if path.is_file() and path.stat().st_size <= _MAX_BYTES)


@lru_cache(maxsize=64)
def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ()
