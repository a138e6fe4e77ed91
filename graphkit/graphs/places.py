"""Lines of code: which one called for something, torch and graphkit themselves left out."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_ROOMS = ("graphs", "ops", "buffers", "runners", "attention", "kv", "targets", "recording", "cli")
_MACHINERY = tuple(str((Path(__file__).parents[1] / room).resolve()) for room in _ROOMS)
_TORCH = str(Path(torch.__file__).parent)
_BLOCKS = str(Path(contextlib.__file__).resolve())
"""Ends blocks of ours, on behalf of the line that wrote them."""
_NOT_THE_USERS = (*(f"{folder}{os.sep}" for folder in (_TORCH, *_MACHINERY)), _BLOCKS)
_COMMAND = "graphkit.cli"
"""What calls it is the shell's, and no line of a user's."""
_GENERATED = ("<eval_with_key", "<frozen ", "<string>")
"""Code without a file, other than what a user types."""


@cache
def is_machinery(filename: str) -> bool:
    """Whether a file belongs to torch or to graphkit's own working."""
    path = str(Path(filename).resolve())
    return path.startswith(_NOT_THE_USERS) or filename.startswith(_GENERATED)


def caller_place() -> str:
    """The user's innermost line on the present stack, with its text."""
    frame = _users_frame()
    if frame is None:
        return "an unknown line"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line} `{linecache.getline(file, line).strip()}`"


def caller_line() -> str:
    """The user's innermost line on the present stack, ``folder/file.py:12 in forward``.

    Without the path before the folder: a record is read elsewhere. Empty if there is none.
    """
    frame = _users_frame()
    if frame is None:
        return ""
    code = frame.f_code
    return f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


@cache
def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_not_the_users(frame):
        is_the_command = str(frame.f_globals.get("__name__")).startswith(_COMMAND)
        frame = None if is_the_command else frame.f_back
    return frame


def _is_not_the_users(frame: FrameType) -> bool:
    """Of torch or of graphkit; what torch.compile writes calls itself a module of torch."""
    module = str(frame.f_globals.get("__name__"))
    return module.startswith("torch.") or is_machinery(frame.f_code.co_filename)
