"""Raises an exception at a chosen line of graphkit, as an interrupt may arrive at any line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import graphkit

_PACKAGE = Path(graphkit.__file__).parent
ROOTS = tuple(
    str(path.resolve()) for path in (_PACKAGE, _PACKAGE / "runners", _PACKAGE / "buffers")
)
DEVICE = (
    "/ops/",
    "/graphs/record",
    "/graphs/host_calls.py",
)
"""Files that stand for the device: an interrupt does not stop a kernel."""


class Line(NamedTuple):
    """A line of a function."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        path = Path(self.code.co_filename).resolve().relative_to(_PACKAGE.resolve().parent)
        return f"{path}:{self.number}"


def is_host(code: CodeType) -> bool:
    """Return whether a function is graphkit's and runs on the host."""
    path = str(Path(code.co_filename).resolve())
    return path.startswith(ROOTS) and not any(part in path for part in DEVICE)


@contextmanager
def _traced(wanted: Callable[[CodeType], bool], on_line: Callable[[Line], None]) -> Iterator[None]:
    """Call ``on_line`` before each line of the wanted functions."""
    known: dict[CodeType, bool] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in known:
            known[code] = wanted(code)
        return in_function if known[code] else None

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            on_line(Line(frame.f_code, frame.f_lineno))
        return in_function

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def is_device(code: CodeType) -> bool:
    """Return whether a function is graphkit's and stands for the device."""
    path = str(Path(code.co_filename).resolve())
    return path.startswith(ROOTS) and any(part in path for part in DEVICE)


def lines_of(
    call: Callable[[], Any], wanted: Callable[[CodeType], bool] = is_host
) -> dict[Line, int]:
    """Call a function, and return how often each line of the wanted functions ran."""
    counts: dict[Line, int] = {}

    def count(line: Line) -> None:
        counts[line] = counts.get(line, 0) + 1

    with _traced(wanted, count):
        call()
    return counts


@contextmanager
def raising_at(line: Line, occurrence: int, error: BaseException) -> Iterator[Callable[[], bool]]:
    """Raise an error before a run of a line, once; yields whether it was raised."""
    left, code, number = occurrence, line.code, line.number

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_function if frame.f_code is code else None

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno == number:
            left -= 1
            if not left:
                sys.settrace(None)
                raise error
        return in_function

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: left <= 0
    finally:
        sys.settrace(before)


@contextmanager
def raising_after(lines: int, error: BaseException) -> Iterator[None]:
    """Raise an error before the line of graphkit's host code that follows so many others, once."""
    left = lines

    def count(_: Line) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise error

    with _traced(is_host, count):
        yield
