"""Numbers of the host, by the path under which a program holds them.

A path begins at an object, which is kept weakly, or at a variable of a function that runs. Reading
it runs no code of the program, see ``graphkit.runners.known_memory``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from graphkit.audit.host_objects.containers import containers
from graphkit.runners.known_memory import bases, class_attributes, is_a, type_name

MISSING = object()
"""In the place of a value that cannot be read."""
NUMBERS = (bool, int, float)
"""Types of the values that are followed; subclasses may compute."""
Step = tuple[str, Any]
"""``attribute`` with a name, ``item`` with a key, or ``length`` with ``None``."""
Steps = tuple[Step, ...]
_COLLECTIONS = (dict, list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class HeldNumber:
    """A number as the program held it at a capture.

    Attributes:
        root: The object where the path begins, or the code of the function whose variable it is.
        steps: The path from there.
        name: The path for people, such as ``Engine.temperature`` or ``decode: length``.
        before: The number.
    """

    root: weakref.ReferenceType[Any] | CodeType
    steps: Steps
    name: str
    before: Any

    def now(self, frames: Mapping[CodeType, FrameType]) -> Any:
        """Return what the program holds there now; ``MISSING`` if the path has ended."""
        if isinstance(self.root, CodeType):
            frame = frames.get(self.root)
            return MISSING if frame is None else follow(frame.f_locals, self.steps)
        return follow(self.root(), self.steps)


def running_frames() -> dict[CodeType, FrameType]:
    """Return the innermost frame of each code on the stack of the caller."""
    frames: dict[CodeType, FrameType] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.setdefault(frame.f_code, frame)
        frame = frame.f_back
    return frames


def object_path(root: Any, steps: Steps, before: Any) -> HeldNumber | None:
    """Return a number that an object holds; ``None`` if the object cannot be kept weakly."""
    if is_a(root, (*_COLLECTIONS, *NUMBERS, str)):
        return None
    try:
        reference = weakref.ref(root)
    except TypeError:
        return None
    is_module = is_a(root, type(sys))
    name = str(root.__name__).rpartition(".")[2] if is_module else type_name(type(root))
    return HeldNumber(reference, steps, path_text(name, steps), before)


def variable_path(code: CodeType, name: str, steps: Steps, before: Any) -> HeldNumber:
    """Return a number that a variable of a function holds, or what the variable refers to."""
    text = f"{code.co_name}: {path_text(name, steps)}"
    return HeldNumber(code, (("item", name), *steps), text, before)


def path_text(name: str, steps: Sequence[Step]) -> str:
    """Return a path as the program writes it."""
    for kind, key in steps:
        if kind == "length":
            name = f"len({name})"
        else:
            name += f".{key}" if kind == "attribute" else f"[{key!r}]"
    return name


def follow(value: Any, steps: Sequence[Step]) -> Any:
    """Return what a path leads to, or ``MISSING``."""
    for kind, key in steps:
        if value is MISSING or value is None:
            return MISSING
        if kind == "length":
            value = len(value) if type(value) in _COLLECTIONS else MISSING
        elif kind == "item":
            value = _item(value, key)
        else:
            value = attribute(value, key)
    return value


def attribute(value: Any, name: str) -> Any:
    """Return an attribute that an object or its class stores, or ``MISSING``."""
    if is_a(value, torch.Tensor):
        return tuple(value.shape) if name == "shape" else MISSING
    if is_a(value, (*_COLLECTIONS, *NUMBERS, str)):
        return MISSING
    for container in containers("", value):
        found = container.get(name, MISSING)
        if found is not MISSING:
            return found
    for base in bases(value if is_a(value, type) else type(value)):
        found = class_attributes(base).get(name, MISSING)
        if found is not MISSING:
            return found if type(found) in NUMBERS or is_a(value, type) else MISSING
    return MISSING


def _item(value: Any, key: Any) -> Any:
    if is_a(value, dict):
        try:
            return dict.get(value, key, MISSING)
        except TypeError:  # the key cannot be hashed
            return MISSING
    is_index = type(key) is int and is_a(value, (list, tuple)) and -len(value) <= key < len(value)
    return value[key] if is_index else MISSING
