"""Source lines on a stack: the innermost ones that belong neither to torch nor to graphkit.

Some code of graphkit is captured like a user's, and its lines are shown: models everywhere, and
drafters and the whole step as the source of nodes.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from graphkit.graphs.module_names import running_module

Frame = tuple[FrameType, int]
"""A frame of a stack and its line number."""

_ROOMS = {room.name: str(room.resolve()) for room in Path(__file__).parents[1].iterdir()}
_ALL_ROOMS = tuple(_ROOMS.values())
_MODELS = (f"{_ROOMS['models']}{os.sep}heads",)
"""Folders of graphkit with models. Their lines are shown like a user's."""
_STEPS = (f"{_ROOMS['engine']}{os.sep}step",)
"""Folders with drafters and with what else is captured around forwards, outside of runners."""
_SITE_PACKAGES = Path(torch.__file__).resolve().parents[1]
_LIBRARIES = tuple(f"{_SITE_PACKAGES / name}{os.sep}" for name in ("torch", "triton", "numpy"))
_CONTEXTLIB = str(Path(contextlib.__file__).resolve())
"""Runs the ends of graphkit's context managers on behalf of the line that entered them."""
_COMMAND = "graphkit.cli"
"""The command is not a user's code: the search for lines ends at its frames."""
_GENERATED = ("<eval_with_key", "<frozen ", "<string>")
"""Names of code without a file, other than code typed at a prompt."""


def caller_line() -> str:
    """Return the innermost user line of the current stack, as ``folder/file.py:12 in forward``.

    The path before the folder is left out, since records are read on other machines. Empty if the
    stack has no user line.
    """
    return _short_line(_user_frames(_current_stack()))


def node_line() -> str:
    """Return the line of the current stack that creates a node, as ``caller_line`` does.

    For operations around the forwards it is the line of graphkit's drafter or step.
    """
    return _short_line(_user_frames(_current_stack(), _STEPS))


def line_in(stack: Sequence[Frame]) -> str:
    """Return the innermost user line of a stack, innermost first, as ``caller_line`` does."""
    return _short_line(_user_frames(stack))


def caller_location() -> str:
    """Return the innermost user line of the current stack; see ``location_in``."""
    return location_in(list(_current_stack())) or "an unknown line"


def location_in(stack: Sequence[Frame]) -> str:
    """Return the innermost user line of a stack: file, line, text, and the module that runs.

    Args:
        stack: Frames, innermost first.

    Returns:
        Such as ``/models/llama.py:12 `x.item()` in module Llama.layers.0``; empty if the stack has
        no user line.
    """
    frame = next(_user_frames(stack), None)
    return "" if frame is None else quoted(frame) + in_module(stack)


def in_module(stack: Sequence[Frame]) -> str:
    """Return `` in module PATH`` for the innermost module that runs in a stack, or nothing."""
    module = running_module([frame for frame, _ in reversed(stack)])
    return f" in module {module}" if module else ""


def user_frames() -> list[FrameType]:
    """Return the user's frames of the current stack, innermost first."""
    return [frame for frame, _ in _user_frames(_current_stack())]


def quoted(frame: Frame) -> str:
    """Return a frame's file, line and text."""
    file, line = frame[0].f_code.co_filename, frame[1]
    return f"{file}:{line} `{linecache.getline(file, line).strip()}`"


def is_graphkit(filename: str) -> bool:
    """Return whether a file belongs to graphkit."""
    return _is_in(filename, _ALL_ROOMS)


@cache
def is_internal(filename: str) -> bool:
    """Return whether a file's lines are not shown: torch, graphkit or generated code.

    Lines of triton and numpy are not shown either; lines of graphkit's models are.
    """
    is_library = _resolved(filename).startswith((*_LIBRARIES, _CONTEXTLIB))
    is_model = _is_in(filename, _MODELS)
    return is_library or filename.startswith(_GENERATED) or (is_graphkit(filename) and not is_model)


@cache
def _is_in(filename: str, rooms: tuple[str, ...]) -> bool:
    path = _resolved(filename)
    return any(path == room or path.startswith(room + os.sep) for room in rooms)


def _current_stack() -> Iterator[Frame]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _user_frames(stack: Iterable[Frame], shown: tuple[str, ...] = ()) -> Iterator[Frame]:
    """Yield the user's frames, and frames of further folders of graphkit that are shown."""
    for frame, line in stack:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_COMMAND):
            return
        # Code that torch.compile generates names a module of torch.
        if module.startswith("torch."):
            continue
        filename = frame.f_code.co_filename
        if not is_internal(filename) or _is_in(filename, shown):
            yield frame, line


def _short_line(frames: Iterator[Frame]) -> str:
    """Return the first frame as ``folder/file.py:12 in forward``; empty without one."""
    for frame, line in frames:
        return f"{_short_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return ""


@cache
def _resolved(filename: str) -> str:
    return str(Path(filename).resolve())


@cache
def _short_path(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])
