"""Source lines and modules that run an operation, outside of torch and graphkit.

Private names of torch, checked on 2.11 and 2.13: ``nn.Module._call_impl``, whose frame has the
module that runs as ``self``, and ``_orig_mod`` of compiled modules.

Some code of graphkit is captured like a user's, and its lines are shown: models everywhere, and
drafters and the whole step as the source of nodes.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from graphkit.config import require_type
from graphkit.errors import InspectError, short_repr

_COMPILED = "_orig_mod"
"""The attribute in which torch.compile keeps the module that it wraps."""


class ModuleNames:
    """Names the modules of a model while they run, one inside the other.

    A module's name is, in this order: its path in the declared model; the declared name of one of
    its weights without the weight's own part; its path below the module that runs around it; its
    class. If a module has several paths, the one below the surrounding module is used, otherwise
    the first.
    """

    def __init__(self, declared: nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        # Weak keys: a module made in a forward may be freed, and a later one may have its id.
        self._paths: MutableMapping[nn.Module, tuple[str, ...]] = WeakIdKeyDictionary()
        self._weights: dict[int, str] = {}
        self._running: list[tuple[nn.Module, str]] = []
        if isinstance(declared, nn.Module):
            self._add(_unwrapped(declared), "")
        elif declared is not None:
            require_type("Attribution", "modules", declared, Mapping, "a module or weights by name")
            self._weights = {weight.data_ptr(): name for name, weight in declared.items()}
            self._weights.pop(0, None)  # tensors without memory, such as those on meta

    def enter(self, module: nn.Module) -> str:
        """Begin a module's forward, and return the module's path."""
        path = self._path(_unwrapped(module))
        self._running.append((module, path))
        return path

    def leave(self, module: nn.Module) -> bool:
        """End a module's forward; return False if ``enter`` was not called for it."""
        was_entered = bool(self._running) and self._running[-1][0] is module
        if was_entered:
            self._running.pop()
        return was_entered

    def reset(self) -> None:
        """Forget the running modules, which a failed capture may not have left."""
        self._running.clear()

    def _path(self, module: nn.Module) -> str:
        if module not in self._paths:
            path = self._path_from_weights(module)
            if path is None:
                path = self._path_below_running(module) or type(module).__name__
            self._add(module, path)
        first, *others = self._paths[module]
        for _, around in reversed(self._running if others else ()):
            for path in (first, *others):
                if path.startswith(f"{around}."):
                    return path
        return first

    def _add(self, module: nn.Module, path: str) -> None:
        """Name a module and all modules below it that have no name yet."""
        paths_of: MutableMapping[nn.Module, tuple[str, ...]] = WeakIdKeyDictionary()
        for name, child in module.named_modules(remove_duplicate=False):
            full = _joined(path, name) or type(module).__name__
            paths_of[child] = (*paths_of.get(child, ()), full)
        for child, paths in paths_of.items():
            self._paths.setdefault(child, paths)

    def _path_from_weights(self, module: nn.Module) -> str | None:
        """Return the path that a declared weight gives; empty for the root, None if unknown."""
        if not self._weights:  # data_ptr() fails for some kinds of parameters
            return None
        for name, weight in module.named_parameters():
            declared = f".{self._weights.get(weight.data_ptr(), '')}"
            if declared.endswith(f".{name}"):
                return declared.removesuffix(f".{name}")[1:]
        return None

    def _path_below_running(self, module: nn.Module) -> str:
        """Return the path of a module that was added to a running one after that was named."""
        for parent, path in reversed(self._running):
            for name, child in parent.named_modules():
                if child is module:
                    return _joined(path, name)
        return ""


def running_module(stack: Iterable[FrameType]) -> str:
    """Return the path of the innermost module that runs in a stack, below the outermost one.

    Frames are outermost first. Empty if no module runs, else such as ``Llama.layers.0``.
    """
    names, path = ModuleNames(None), ""
    for frame in stack:
        if frame.f_code is nn.Module._call_impl.__code__:
            path = names.enter(frame.f_locals["self"])
    return path


def _unwrapped(module: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(module, _COMPILED, module)
    return inner


def _joined(path: str, name: str) -> str:
    """Join a path and a name below it, without the wrappers of torch.compile."""
    return ".".join(part for part in (path, *name.split(".")) if part not in ("", _COMPILED))


def named_tensors(
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by path.

    A mapping is returned as a dict, ``None`` as an empty one.

    Raises:
        InspectError: It is something else.
    """
    if weights is not None and not isinstance(weights, (nn.Module, Mapping)):
        raise InspectError(
            f"weights must be a module or tensors by name, got {short_repr(weights)}."
        )
    if isinstance(weights, nn.Module):
        return dict([*weights.named_parameters(), *weights.named_buffers()])
    return dict(weights or {})


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
    """Return the innermost user line of a stack, innermost first: file, line, text and module.

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
