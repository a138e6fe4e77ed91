"""What a forward can reach on the host, by the names that its author would use.

A forward's own object, what its function closes over, the globals that it names, and the attributes
of all these: modules at any depth, plain objects two levels deep. What belongs to graphkit, torch
or the standard library is left out: it minds its own state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from graphkit.attention import AttentionBackend

LEVELS = 2
"""How deep attributes of plain objects are followed."""
MOST_ITEMS = 64
"""Longer lists and dicts are data, not attributes."""
_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "triton", "cuda", "graphkit"}
_EVERY_MODULES = frozenset(vars(nn.Module()))


class Container:
    """A dict that holds values by name, or a part of one.

    Attributes:
        prefix: What it is called.
    """

    form = "{}.{}"

    def __init__(
        self, prefix: str, held: dict[Any, Any], keep: Callable[[Any], bool] = lambda _key: True
    ) -> None:
        self.prefix, self._held, self._keep = prefix, held, keep

    def name(self, key: Any) -> str:
        """What an entry is called."""
        return self.form.format(self.prefix, key)

    def read(self) -> dict[Any, Any]:
        """What it holds now."""
        return {key: value for key, value in self._held.items() if self._keep(key)}

    def put_back(self, saved: Mapping[Any, Any]) -> None:
        """Let it hold again what ``read`` gave, and nothing else."""
        now = self.read()
        for key in now.keys() - saved.keys():
            del self._held[key]
        for key, value in saved.items():
            if key not in now or now[key] is not value:
                self._held[key] = value


class _Items(Container):
    """A dict of the user's."""

    form = "{}[{!r}]"


class _List(Container):
    """A list or a tuple."""

    form = "{}[{}]"

    def __init__(self, prefix: str, held: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(prefix, {})
        self._items = held

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._items))

    def put_back(self, saved: Mapping[Any, Any]) -> None:
        if isinstance(self._items, list):
            self._items[:] = saved.values()


class _Cells(Container):
    """What a function closes over."""

    def __init__(self, prefix: str, names: tuple[str, ...], cells: tuple[CellType, ...]) -> None:
        super().__init__(prefix, {})
        self._cells = dict(zip(names, cells, strict=True))

    def read(self) -> dict[Any, Any]:
        return {name: value for name, cell in self._cells.items() for value in _contents(cell)}

    def put_back(self, saved: Mapping[Any, Any]) -> None:
        for name, value in saved.items():
            self._cells[name].cell_contents = value


class ReachableObjects:
    """What everything holds that some roots can reach, each thing once, as it is now.

    Args:
        roots: Forwards, or sequences of them, by name.

    Attributes:
        entries: Each holder, and what it holds.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        walk = _Walk()
        for name, root in roots.items():
            many = isinstance(root, (list, tuple, nn.ModuleList))
            for i, each in enumerate(root if many else (root,)):
                walk.enter(f"{name}[{i}]" if many else name, each, LEVELS, is_root=True)
        self.entries = tuple((holder, holder.read()) for holder in walk.holders)

    def put_back(self) -> None:
        """Let everything hold again what it held; what is in tensors stays."""
        for holder, entries in self.entries:
            holder.put_back(entries)


class _Walk:
    """Goes from thing to thing."""

    def __init__(self) -> None:
        self.holders: list[Container] = []
        self._seen: dict[int, Any] = {}

    def enter(self, name: str, value: Any, levels: int, is_root: bool = False) -> None:
        """Go through what a thing holds, and on from there."""
        is_module = isinstance(value, nn.Module)
        if not (is_root or is_module or (levels and _is_entered(value))) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept, so that nothing else gets its id
        inside = LEVELS if is_module else levels if is_root else levels - 1
        for holder in _holders(name, value):
            self.holders.append(holder)
            for key, inner in holder.read().items():
                self.enter(holder.name(key), inner, inside)


def _is_entered(value: Any) -> bool:
    if isinstance(value, (MethodType, partial, SimpleNamespace)):
        return True
    if isinstance(value, (list, tuple, dict)):
        return len(value) <= MOST_ITEMS
    if isinstance(value, (type, Enum, AttentionBackend)):
        return False
    owner = value if isinstance(value, FunctionType) else type(value)
    return hasattr(value, "__dict__") and str(owner.__module__).split(".")[0] not in _OTHERS


def _holders(name: str, value: Any) -> Iterator[Container]:
    if isinstance(value, nn.Module):
        yield Container(name, vars(value), lambda key: key not in _EVERY_MODULES)
        for apart in (value._parameters, value._buffers, value._modules):
            yield Container(name, apart)
        yield from _globals_of(type(value), "forward")
    elif isinstance(value, FunctionType):
        yield _Cells(name, value.__code__.co_freevars, value.__closure__ or ())
        yield Container(name, vars(value))
        yield from _named_globals(value)
    elif isinstance(value, MethodType):
        yield from _holders(type(value.__self__).__name__, value.__self__)
        yield from _holders(name, value.__func__)
    elif isinstance(value, partial):
        yield Container(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
    elif isinstance(value, dict):
        yield _Items(name, value)
    elif isinstance(value, (list, tuple)):
        yield _List(name, value)
    else:
        yield Container(name, vars(value))
        yield from _globals_of(type(value), "__call__")


def _globals_of(kind: type, method: str) -> Iterator[Container]:
    """The globals that a method of a user's class names."""
    function = getattr(kind, method, None)
    if isinstance(function, FunctionType) and _is_entered(function):
        yield from _named_globals(function)


def _named_globals(function: FunctionType) -> Iterator[Container]:
    names = frozenset(function.__code__.co_names)
    module = str(function.__module__ or "globals")  # code that was made by exec has no module
    yield Container(module.rpartition(".")[2], function.__globals__, names.__contains__)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """What a cell holds; nothing while its variable has no value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
