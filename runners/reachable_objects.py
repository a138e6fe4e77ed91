"""Walk the host objects that a forward can reach, named as its author would write them.

The walk enters the forward's own object, the variables that its function closes over, the globals
that its code names, those of the user's modules among them, and the attributes of all of these:
modules at any depth, plain objects two levels deep. Code is the forward and the methods that it
names. Objects of graphkit, torch and the standard library are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from inspect import unwrap
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes

from torch import nn

from graphkit.attention import AttentionBackend
from graphkit.runners.step import name_of

MAX_ITEMS = 64
"""Length up to which the walk enters lists and dicts; longer ones are data."""
_MAX_DEPTH = 2
"""Levels of plain objects that the walk enters."""
_EXCLUDED_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "triton", "cuda", "graphkit"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_CLASS_VALUES = (bool, int, float)
"""Types of class attributes that count as values of the forward."""


def roots_of(forward: Any) -> dict[str, Any]:
    """Return a forward, or a sequence of forwards, by name, as the root of a walk."""
    is_sequence = isinstance(forward, (Sequence, nn.ModuleList))
    forwards = [unwrap(each) for each in (forward if is_sequence else (forward,))]
    name = name_of(forwards[0]).rpartition(".")[2]
    return {name: forwards if is_sequence else forwards[0]}


class Container:
    """A dict of named values, or the part of one whose keys are kept.

    Args:
        prefix: Name of the object that the values belong to.
        values: The dict, by reference.
        keep: Selects keys.
        name_format: Format of a full name, from prefix and key.

    Attributes:
        owner: The module, the function or the object that holds the values, directly or in a list
            or a dict.
    """

    def __init__(
        self,
        prefix: str,
        values: dict[Any, Any],
        keep: Callable[[Any], bool] = lambda _key: True,
        name_format: str = "{}.{}",
    ) -> None:
        self.owner: Any = None
        self.prefix = prefix
        self._values = values
        self._keep, self._name_format = keep, name_format

    @property
    def place(self) -> int:
        """Identifies the storage of the values while the container exists."""
        return id(self._values)

    def name(self, key: Any) -> str:
        """Return the full name of a value."""
        return self._name_format.format(self.prefix, key)

    def read(self) -> dict[Any, Any]:
        """Return the current values by key."""
        return {key: value for key, value in self._values.items() if self._keep(key)}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the current value of a key, or a default."""
        return self._values.get(key, default)

    def set(self, key: Any, value: Any) -> None:
        """Set the value of a key."""
        self._values[key] = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        """Set the values to those that ``read`` returned, and delete all others."""
        now = self.read()
        for key in now.keys() - saved.keys():
            del self._values[key]
        for key, value in saved.items():
            if key not in now or now[key] is not value:
                self.set(key, value)


class _ListItems(Container):
    """Items of a list or a tuple."""

    def __init__(self, prefix: str, items: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(prefix, {}, name_format="{}[{}]")
        self._items = items

    @property
    def place(self) -> int:
        return id(self._items)

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self._items))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._items[key] if key < len(self._items) else default

    def set(self, key: Any, value: Any) -> None:
        if isinstance(self._items, list):
            self._items[key] = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        if isinstance(self._items, list):
            self._items[:] = saved.values()


class _ClosureCells(Container):
    """Variables that a function closes over."""

    def __init__(self, prefix: str, function: FunctionType) -> None:
        super().__init__(prefix, {})
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._cells: dict[str, CellType] = dict(zip(names, cells, strict=True))

    def read(self) -> dict[Any, Any]:
        return {name: value for name, cell in self._cells.items() for value in _contents(cell)}

    def get(self, key: Any, default: Any = None) -> Any:
        return next(iter(_contents(self._cells[key])), default)

    def set(self, key: Any, value: Any) -> None:
        self._cells[key].cell_contents = value

    def restore(self, saved: Mapping[Any, Any]) -> None:
        for name, value in saved.items():
            self.set(name, value)


class _ClassAttributes(Container):
    """Numbers among the attributes of a class.

    Args:
        cls: The class.
        hidden: Attributes that an instance has, too.
    """

    def __init__(self, cls: type, hidden: Collection[str]) -> None:
        super().__init__(cls.__name__, {}, lambda key: key not in hidden)
        self._class = cls

    @property
    def place(self) -> int:
        return id(self._class)

    def read(self) -> dict[Any, Any]:
        values = {key: value for key, value in vars(self._class).items() if self._keep(key)}
        return {key: value for key, value in values.items() if type(value) in _CLASS_VALUES}

    def get(self, key: Any, default: Any = None) -> Any:
        return vars(self._class).get(key, default)

    def set(self, key: Any, value: Any) -> None:
        setattr(self._class, key, value)

    def restore(self, saved: Mapping[Any, Any]) -> None:
        for key, value in saved.items():
            if self.get(key) is not value:
                self.set(key, value)


class ReachableObjects:
    """References that the objects reachable from some roots hold, as of construction.

    Args:
        roots: Forwards, or sequences of forwards, by name.

    Attributes:
        entries: Each container, once, with the values that it held.
        words: The names and the words that the code of the forwards contains, such as the
            attributes that it reads.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        walk = _Walk()
        for name, root in roots.items():
            is_sequence = isinstance(root, (list, tuple, nn.ModuleList))
            for i, each in enumerate(root if is_sequence else (root,)):
                walk.enter(f"{name}[{i}]" if is_sequence else name, each, _MAX_DEPTH, is_root=True)
        self.entries = tuple((container, container.read()) for container in walk.containers)
        self.words: frozenset[str] = frozenset(walk.words)

    def restore(self) -> None:
        """Restore all references. The contents of tensors are not restored."""
        for container, values in self.entries:
            container.restore(values)


class _Walk:
    """Collects the containers of objects, each object once."""

    def __init__(self) -> None:
        self.containers: list[Container] = []
        self.words: set[str] = set()
        self._seen: dict[int, Any] = {}

    def enter(
        self, name: str, value: Any, depth: int, owner: Any = None, is_root: bool = False
    ) -> None:
        """Collect the containers of an object and of the objects in them."""
        if type(value) in ProxyTypes:  # isinstance raises if its object is gone
            return
        is_module = isinstance(value, nn.Module)
        if not (is_root or is_module or (depth and _is_entered(value))) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # the reference keeps the id from being used again
        inner_depth = _MAX_DEPTH if is_module else depth if is_root else depth - 1
        if not isinstance(value, (list, tuple, dict)):
            owner = value
        code = list(self._code(value))  # first: its words choose the methods of inner objects
        for container in (*_containers(name, value), *code):
            container.owner = owner if container.owner is None else container.owner
            self.containers.append(container)
            for key, inner in container.read().items():
                self.enter(container.name(key), inner, inner_depth, container.owner)

    def _code(self, value: Any) -> Iterator[Container]:
        """Yield the globals that the code of a function or of an object names."""
        if isinstance(value, MethodType):
            yield from self._of_class(value.__self__, {value.__func__.__name__})
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif not isinstance(value, (list, tuple, dict, partial, ModuleType)):
            is_module = isinstance(value, nn.Module)
            yield from self._of_class(value, {"forward"} if is_module else {"__call__"})

    def _of_class(self, value: Any, methods: set[str]) -> Iterator[Container]:
        """Yield the globals that methods of a user's class name, and the numbers of the class.

        Args:
            value: An object of the class.
            methods: Methods that are called; those that their code names follow.
        """
        cls = type(value)
        if id(cls) in self._seen or not _is_users(cls):
            return
        self._seen[id(cls)] = cls
        pending, known = [*methods, *self.words], set(methods)
        while pending:
            name = pending.pop()
            for function in _functions(cls, name):
                yield from self._of_function(function)
                new = words_of(function.__code__) - known
                known |= new
                pending += new
        for each in cls.__mro__:
            if _is_users(each):
                container = _ClassAttributes(each, frozenset(getattr(value, "__dict__", ())))
                container.owner = each
                yield container

    def _of_function(self, function: FunctionType) -> Iterator[Container]:
        """Yield the globals that a function's code names, also those of the user's modules."""
        words = words_of(function.__code__)
        self.words |= words
        # The module is None for code that exec compiled.
        name = str(function.__module__ or "globals").rpartition(".")[2]
        container = Container(name, function.__globals__, words.__contains__)
        container.owner = function
        yield container
        for value in container.read().values():
            if isinstance(value, ModuleType) and _is_users(value) and id(value) not in self._seen:
                inner = value.__name__.rpartition(".")[2]
                container = Container(inner, vars(value), words.__contains__)
                container.owner = value
                yield container


def words_of(code: CodeType) -> set[str]:
    """Return the names and the words in code and in the functions that it defines."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    words = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    return words.union(code.co_names, code.co_freevars, *map(words_of, inner))


def _functions(cls: type, name: str) -> Iterator[FunctionType]:
    """Yield a method or property of a class and of the classes that it overrides."""
    for each in cls.__mro__:
        method = vars(each).get(name)
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        if isinstance(function, FunctionType) and _is_entered(function):
            yield function
            if (inner := unwrap(function)) is not function and isinstance(inner, FunctionType):
                yield inner


def _is_entered(value: Any) -> bool:
    if isinstance(value, (MethodType, partial, SimpleNamespace)):
        return True
    if isinstance(value, (list, tuple, dict)):
        return len(value) <= MAX_ITEMS
    if isinstance(value, (type, Enum, AttentionBackend, ModuleType)):
        return False
    return hasattr(value, "__dict__") and _is_users(
        value if isinstance(value, FunctionType) else type(value)
    )


def _is_users(value: Any) -> bool:
    """Return whether a function, a class or a module belongs to the user, not to a library."""
    name = value.__name__ if isinstance(value, ModuleType) else str(value.__module__)
    return name.split(".")[0] not in _EXCLUDED_PACKAGES


def _containers(name: str, value: Any) -> Iterator[Container]:
    if isinstance(value, nn.Module):
        yield Container(name, vars(value), lambda key: key not in _MODULE_ATTRIBUTES)
        for values in (value._parameters, value._buffers, value._modules):
            yield Container(name, values)
    elif isinstance(value, FunctionType):
        yield _ClosureCells(name, value)
        yield Container(name, vars(value))
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


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return the content of a cell, or nothing while its variable is unbound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
