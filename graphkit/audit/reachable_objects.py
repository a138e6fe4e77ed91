"""Walk the host objects that a forward can reach, named as its author would write them.

The walk enters the forward's own object, the variables that its function closes over, the globals
that its code names, and the attributes of all of these: modules at any depth, plain objects two
levels deep. Objects of graphkit, torch and the standard library are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import unwrap
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from graphkit.attention import AttentionBackend
from graphkit.runners import Runner
from graphkit.runners.step import name_of
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget

MAX_ITEMS = 64
"""Length up to which the walk enters lists and dicts; longer ones are data."""
_MAX_DEPTH = 2
"""Levels of plain objects that the walk enters."""
_EXCLUDED_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "triton", "cuda", "graphkit"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def forward_roots(target: CaptureTarget, mode: ForwardMode) -> dict[str, Any]:
    """Return the forward of a mode by name, as the root of a walk."""
    forward = target.forwards[mode]
    first = forward[0] if isinstance(forward, Sequence) else forward
    return {name_of(first).rpartition(".")[2]: forward}


def roots_of(runner: Runner[Any, Any]) -> dict[str, Any]:
    """Return the forward of a runner by name, as the root of a walk."""
    forward = runner.step.forward
    each = [unwrap(one) for one in (forward if isinstance(forward, tuple) else (forward,))]
    return {runner.step.name.rpartition(".")[2]: each if isinstance(forward, tuple) else each[0]}


class Container:
    """A dict of named values, or the part of one whose keys are kept.

    Args:
        prefix: Name of the object that the values belong to.
        values: The dict, by reference.
        keep: Selects keys.
        name_format: Format of a full name, from prefix and key.
    """

    def __init__(
        self,
        prefix: str,
        values: dict[Any, Any],
        keep: Callable[[Any], bool] = lambda _key: True,
        name_format: str = "{}.{}",
    ) -> None:
        self._prefix, self._values = prefix, values
        self._keep, self._name_format = keep, name_format

    def name(self, key: Any) -> str:
        """Return the full name of a value."""
        return self._name_format.format(self._prefix, key)

    def read(self) -> dict[Any, Any]:
        """Return the current values by key."""
        return {key: value for key, value in self._values.items() if self._keep(key)}

    def restore(self, saved: Mapping[Any, Any]) -> None:
        """Set the values to those that ``read`` returned, and delete all others."""
        now = self.read()
        for key in now.keys() - saved.keys():
            del self._values[key]
        for key, value in saved.items():
            if key not in now or now[key] is not value:
                self._values[key] = value


class _ListItems(Container):
    """Items of a list or a tuple."""

    def __init__(self, prefix: str, items: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(prefix, {}, name_format="{}[{}]")
        self._items = items

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._items))

    def restore(self, saved: Mapping[Any, Any]) -> None:
        if isinstance(self._items, list):
            self._items[:] = saved.values()


class _ClosureCells(Container):
    """Variables that a function closes over."""

    def __init__(self, prefix: str, names: tuple[str, ...], cells: tuple[CellType, ...]) -> None:
        super().__init__(prefix, {})
        self._cells = dict(zip(names, cells, strict=True))

    def read(self) -> dict[Any, Any]:
        return {name: value for name, cell in self._cells.items() for value in _contents(cell)}

    def restore(self, saved: Mapping[Any, Any]) -> None:
        for name, value in saved.items():
            self._cells[name].cell_contents = value


class ReachableObjects:
    """References that the objects reachable from some roots hold, as of construction.

    Args:
        roots: Forwards, or sequences of forwards, by name.

    Attributes:
        entries: Each container, once, with the values that it held.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        walk = _Walk()
        for name, root in roots.items():
            is_sequence = isinstance(root, (list, tuple, nn.ModuleList))
            for i, each in enumerate(root if is_sequence else (root,)):
                walk.enter(f"{name}[{i}]" if is_sequence else name, each, _MAX_DEPTH, is_root=True)
        self.entries = tuple((container, container.read()) for container in walk.containers)

    def restore(self) -> None:
        """Restore all references. The contents of tensors are not restored."""
        for container, values in self.entries:
            container.restore(values)


class _Walk:
    """Collects the containers of objects, each object once."""

    def __init__(self) -> None:
        self.containers: list[Container] = []
        self._seen: dict[int, Any] = {}

    def enter(self, name: str, value: Any, depth: int, is_root: bool = False) -> None:
        """Collect the containers of an object and of the objects in them."""
        is_module = isinstance(value, nn.Module)
        if not (is_root or is_module or (depth and _is_entered(value))) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # the reference keeps the id from being used again
        inner_depth = _MAX_DEPTH if is_module else depth if is_root else depth - 1
        for container in _containers(name, value):
            self.containers.append(container)
            for key, inner in container.read().items():
                self.enter(container.name(key), inner, inner_depth)


def _is_entered(value: Any) -> bool:
    if isinstance(value, (MethodType, partial, SimpleNamespace)):
        return True
    if isinstance(value, (list, tuple, dict)):
        return len(value) <= MAX_ITEMS
    if isinstance(value, (type, Enum, AttentionBackend)):
        return False
    owner = value if isinstance(value, FunctionType) else type(value)
    package = str(owner.__module__).split(".")[0]
    return hasattr(value, "__dict__") and package not in _EXCLUDED_PACKAGES


def _containers(name: str, value: Any) -> Iterator[Container]:
    if isinstance(value, nn.Module):
        yield Container(name, vars(value), lambda key: key not in _MODULE_ATTRIBUTES)
        for values in (value._parameters, value._buffers, value._modules):
            yield Container(name, values)
        yield from _globals_of_method(type(value), "forward")
    elif isinstance(value, FunctionType):
        yield _ClosureCells(name, value.__code__.co_freevars, value.__closure__ or ())
        yield Container(name, vars(value))
        yield _globals_of(value)
    elif isinstance(value, MethodType):
        yield from _containers(type(value.__self__).__name__, value.__self__)
        yield from _containers(name, value.__func__)
    elif isinstance(value, partial):
        yield Container(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    elif isinstance(value, dict):
        yield Container(name, value, name_format="{}[{!r}]")
    elif isinstance(value, (list, tuple)):
        yield _ListItems(name, value)
    else:
        yield Container(name, vars(value))
        yield from _globals_of_method(type(value), "__call__")


def _globals_of_method(cls: type, method: str) -> Iterator[Container]:
    """Yield the globals that a method of a user's class names."""
    function = getattr(cls, method, None)
    if isinstance(function, FunctionType) and _is_entered(function):
        yield _globals_of(function)


def _globals_of(function: FunctionType) -> Container:
    """Return the globals that a function's code names."""
    names = frozenset(function.__code__.co_names)
    module = str(function.__module__ or "globals")  # None for code that exec compiled
    return Container(module.rpartition(".")[2], function.__globals__, names.__contains__)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return the content of a cell, or nothing while its variable is unbound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
