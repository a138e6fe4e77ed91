"""Lines of user code that change values: found by tracing a run line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from graphkit.graphs.source_lines import Frame, is_internal, line_in

_PLAIN = (bool, int, float, complex, str, bytes)


def changing_lines(
    run: Callable[[], object], values: Mapping[str, Callable[[], Any]]
) -> dict[str, str]:
    """Return the first line that changes each of some values in a run.

    A value changes if it becomes another object, if a tensor is written through torch, or if the
    length of a container differs. Writes of kernels that torch does not see, and those of compiled
    code, have no line.

    Args:
        run: Runs the code once, in this thread.
        values: Returns the current value, by name.

    Returns:
        Such as ``broken/counter.py:12 in forward``, by name; without values that did not change.
    """
    trace = _LineTrace(values)
    before = sys.gettrace()
    sys.settrace(trace.on_call)
    try:
        run()
    finally:
        sys.settrace(before)
    return trace.lines


class _LineTrace:
    """A trace function that compares the values before each line of user code."""

    def __init__(self, values: Mapping[str, Callable[[], Any]]) -> None:
        self.lines: dict[str, str] = {}
        self._values = dict(values)
        self._before = {name: _state(read()) for name, read in values.items()}
        self._running: Frame | None = None
        """The line that runs."""

    def on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Trace the lines of a function unless it belongs to torch or graphkit."""
        return None if is_internal(frame.f_code.co_filename) else self._on_line

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event not in ("line", "return"):
            return self._on_line
        if self._running is not None:
            self._compare(self._running)
        if event == "line":
            self._running = frame, frame.f_lineno
        else:  # the line of the caller continues
            self._running = None if frame.f_back is None else (frame.f_back, frame.f_back.f_lineno)
        return self._on_line

    def _compare(self, line: Frame) -> None:
        for name, read in list(self._values.items()):
            before, now = self._before[name], _state(read())
            if before[0] is not now[0] or before[1] != now[1]:
                self.lines[name] = line_in([line])
                del self._values[name]


def _state(value: Any) -> tuple[Any, Any]:
    """Return a value, which keeps its id from being used again, and what a write changes."""
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version
    if isinstance(value, _PLAIN):
        return None, repr(value)
    return value, len(value) if isinstance(value, (list, dict, set)) else None
