"""Overrides of a user: comparison with the method that they override, and calls."""

from __future__ import annotations

import inspect
from typing import Any

from graphkit.errors import ConfigError, GraphkitError, short_repr

_NOT_PLAIN = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}
"""Functions that return before their body has run."""


def signature_mismatch(instance: object, name: str, base: type) -> str | None:
    """Return why ``instance.name`` cannot be called like ``base.name``; ``None`` if it can.

    An override may rename parameters and add optional ones: callers pass positional arguments.
    """
    owner, method = type(instance).__name__, getattr(instance, name, None)
    parameters = list(inspect.signature(getattr(base, name)).parameters)[1:]
    remedy = f"Give it the parameters of {base.__name__}.{name}."
    if not callable(method):
        return f"{owner}.{name} is {short_repr(method)}, expected a method. {remedy}"
    function = method.__func__ if inspect.ismethod(method) else method
    for kind, is_kind in _NOT_PLAIN.items():
        if is_kind(function):
            return f"{owner}.{name} is {kind}, whose body a call does not run. Define it with def."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature, such as a builtin
        return None
    arguments = ["self", *parameters] if inspect.ismethod(method) else parameters
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = ", ".join(arguments)
        return f"{owner}.{name}{signature} is called with ({called}): {error}. {remedy}"
    return None


def call_override(instance: object, name: str, *arguments: object, field: str) -> Any:
    """Call a method that a user may have overridden.

    Raises:
        ConfigError: The method raised an exception, which is the cause of this one.
    """
    try:
        return getattr(instance, name)(*arguments)
    except GraphkitError:
        raise
    except Exception as error:
        called = f"{type(instance).__name__}.{name}({', '.join(map(repr, arguments))})"
        raise ConfigError(
            f"{called} raised {type(error).__name__}: {error}. Correct the method.", field=field
        ) from error
