"""Walk the host objects that a forward can reach, named as its author would write them.

The walk enters the forward's own object, the variables that its function closes over, the defaults
of its arguments, the globals that its code names, also in the user's modules, and the attributes of
all of these: modules at any depth, plain objects, lists and dicts some levels deep. Code is the
forward and the methods that it names. Objects of graphkit, torch and the standard library are left
out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import cached_property, partial
from threading import local
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar
from weakref import ReferenceType

from torch import nn

from graphkit.audit.host_objects.containers import Container, class_values, containers
from graphkit.buffers import AttentionBackend
from graphkit.runners.known_memory import (
    bases,
    class_attributes,
    is_a,
    items_of,
    own_attributes,
    type_name,
)
from graphkit.runners.step import forward_name

_T = TypeVar("_T")
_COLLECTIONS = (list, tuple, deque, dict)
MAX_ITEMS = 64
"""Length up to which the walk enters lists and dicts; longer ones are data."""
_MAX_DEPTH = 2
"""Levels of plain objects, lists and dicts that the walk enters."""
SEARCH_DEPTH = 4
"""The same for a walk that looks for values that the code of a forward may read anywhere."""
_EXCLUDED_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "triton", "cuda", "graphkit"}


def walk_roots(forward: Any) -> dict[str, Any]:
    """Return a forward, or a sequence of forwards, by name, as the root of a walk."""
    is_sequence = is_a(forward, (Sequence, nn.ModuleList))
    forwards = [_unwrapped(one, is_root=True) for one in (forward if is_sequence else (forward,))]
    name = forward_name(forwards[0]).rpartition(".")[2]
    return {name: forwards if is_sequence else forwards[0]}


class ReachableObjects:
    """References that the objects reachable from some roots hold, as of construction.

    Args:
        roots: Forwards, or sequences of forwards, by name.
        depth: Levels of plain objects, lists and dicts that the walk enters below a module.

    Attributes:
        functions: The functions whose code the walk read.
        entries: Each container, once, with the values that it held.
        words: The names and the words that the code of the forwards contains, such as the
            attributes that it reads.
    """

    def __init__(self, roots: Mapping[str, Any], depth: int = _MAX_DEPTH) -> None:
        walk = _Walk(depth)
        for name, root in roots.items():
            is_sequence = is_a(root, (list, tuple, nn.ModuleList))
            for i, forward in enumerate(root if is_sequence else (root,)):
                walk.enter(f"{name}[{i}]" if is_sequence else name, forward, depth, is_root=True)
        self.entries = tuple((container, container.read()) for container in walk.containers)
        self.words: frozenset[str] = frozenset(walk.words)
        self.functions = tuple(walk.functions)

    def values_of(self, kind: type[_T]) -> Iterator[tuple[Container, Any, _T]]:
        """Yield container, key and value of each value of a type, as of construction."""
        for container, values in self.entries:
            for key, value in values.items():
                if is_a(value, kind):
                    yield container, key, value

    def restore(self) -> None:
        """Restore all references. The contents of tensors are not restored."""
        for container, values in self.entries:
            container.restore(values)


class _Walk:
    """Collects the containers of objects, each object once."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.containers: list[Container] = []
        self.words: set[str] = set()
        self.functions: list[FunctionType] = []
        self._seen: dict[int, Any] = {}

    def enter(
        self,
        name: str,
        value: Any,
        depth: int,
        owner: Any = None,
        parent: tuple[Container, Any] | None = None,
        is_root: bool = False,
    ) -> None:
        """Collect the containers of an object and of the objects in them."""
        is_module = is_a(value, nn.Module)
        if not (is_root or is_module or (depth and _is_entered(value))) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # the reference keeps the id from being used again
        is_code = is_root or is_a(value, (FunctionType, MethodType, partial))
        inner_depth = self._depth if is_module else depth if is_code else depth - 1
        if not is_a(value, _COLLECTIONS):
            owner = value
        code = list(self._code(value))  # first: its words choose the methods of inner objects
        own = list(containers(name, value))
        for container in own:
            container.parent, container.source = parent, value
        for container in (*own, *code):
            container.owner = owner if container.owner is None else container.owner
            self.containers.append(container)
            for key, inner in container.read().items():
                place = container, key
                self.enter(container.name(key), inner, inner_depth, container.owner, place)

    def _code(self, value: Any) -> Iterator[Container]:
        """Yield the globals that the code of a function or of an object names."""
        if is_a(value, MethodType):
            yield from self._class_containers(value.__self__, {value.__func__.__name__})
        elif is_a(value, FunctionType):
            yield from self._function_containers(value)
        elif is_a(value, partial):
            self.words |= {"args", "keywords"}
        elif is_a(value, type):
            yield from _class_values(value, {})
        elif not is_a(value, (*_COLLECTIONS, ModuleType)):
            is_module = is_a(value, nn.Module)
            yield from self._class_containers(value, {"forward"} if is_module else {"__call__"})

    def _class_containers(self, value: Any, methods: set[str]) -> Iterator[Container]:
        """Yield what methods of a user's class name, and the values of the class.

        Args:
            value: An object of the class.
            methods: Methods that are called; those that their code names follow.
        """
        cls = type(value)
        if not _is_user_code(cls):
            if is_a(value, nn.Module) and is_a(cls.forward, FunctionType):  # a module of torch
                self.words |= code_words(cls.forward.__code__)
            return
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        pending, known = [*methods, *self.words], set(methods)
        while pending:
            name = pending.pop()
            for function in _functions(cls, name):
                yield from containers(f"{type_name(cls)}.{name}", function)
                yield from self._function_containers(function)
                new = code_words(function.__code__) - known
                known |= new
                pending += new
        yield from _class_values(cls, own_attributes(value))

    def _function_containers(self, function: FunctionType) -> Iterator[Container]:
        """Yield the globals that a function's code names, and those in the user's modules."""
        words = code_words(function.__code__)
        self.words |= words
        self.functions.append(function)
        # The module is None for code that exec compiled.
        name = str(function.__module__ or "globals").rpartition(".")[2]
        container = Container(name, function.__globals__, words.__contains__)
        container.owner = function
        yield container
        for value in container.read().values():
            if is_a(value, ModuleType) and _is_user_code(value) and id(value) not in self._seen:
                attributes = own_attributes(value)
                inner = str(attributes["__name__"]).rpartition(".")[2]
                container = Container(inner, attributes, words.__contains__)
                container.owner = value
                yield container


def _class_values(cls: type, own: dict[str, Any]) -> Iterator[Container]:
    return (class_values(base, own) for base in bases(cls) if _is_user_code(base))


def code_words(code: CodeType) -> set[str]:
    """Return the names and the words in code and in the functions that it defines.

    ``co_names`` has the globals and attributes that code names, ``co_varnames`` begins with its
    arguments, and ``co_consts`` has its strings, such as the name in ``getattr(self, "scale")``,
    and the code of inner functions. Python documents them; checked with CPython 3.11 and 3.12.
    """
    constants = code.co_consts
    words = {text for text in constants if isinstance(text, str) and text.isidentifier()}
    inner = (constant for constant in constants if isinstance(constant, CodeType))
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return words.union(code.co_names, code.co_freevars, arguments, *map(code_words, inner))


def _functions(cls: type, name: str) -> Iterator[FunctionType]:
    """Yield a method or property of a class and of the classes that it overrides."""
    for base in bases(cls):
        method: Any = class_attributes(base).get(name)
        if is_a(method, property):
            method = method.fget
        elif is_a(method, cached_property):
            method = method.func
        elif is_a(method, (classmethod, staticmethod)):
            method = method.__func__
        if is_a(method, FunctionType) and _is_entered(method):
            yield method
            inner = _unwrapped(method)
            if inner is not method and is_a(inner, FunctionType):
                yield inner


def _unwrapped(function: Any, *, is_root: bool = False) -> Any:
    """Return what a function wraps at last, as ``inspect.unwrap`` does.

    A root is unwrapped only as far as libraries wrap it: a user's wrapper may read values, too.
    """
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        if is_root and is_a(function, FunctionType):
            package = str(function.__globals__.get("__name__")).split(".")[0]
            if package not in _EXCLUDED_PACKAGES:
                break
        function = own_attributes(function).get("__wrapped__", function)
    return function


def _is_entered(value: Any) -> bool:
    if is_a(value, (MethodType, partial, SimpleNamespace, ReferenceType, ContextVar, local)):
        return True
    if is_a(value, type):
        return _is_user_code(value) and Enum not in bases(value)
    if is_a(value, dict):
        return dict.__len__(value) <= MAX_ITEMS
    if (items := items_of(value)) is not None:
        return len(items) <= MAX_ITEMS
    if is_a(value, (Enum, ModuleType)) or is_a(value, AttentionBackend):
        return False
    return _is_user_code(value if is_a(value, FunctionType) else type(value))


def _is_user_code(value: Any) -> bool:
    """Return whether a function, a class or a module belongs to the user, not to a library."""
    if is_a(value, ModuleType):
        name = own_attributes(value).get("__name__")
    else:
        name = class_attributes(value).get("__module__") if is_a(value, type) else value.__module__
    return str(name).split(".")[0] not in _EXCLUDED_PACKAGES
