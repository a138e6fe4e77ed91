"""Comparison of a user's override with the method that it overrides."""

from __future__ import annotations

import inspect


def signature_mismatch(instance: object, name: str, base: type) -> str | None:
    """Return why ``instance.name`` cannot be called like ``base.name``; ``None`` if it can.

    An override may rename parameters and add optional ones: callers pass positional arguments.

    Args:
        instance: The object with the override.
        name: The method.
        base: The class whose method defines the parameters.
    """
    owner, method = type(instance).__name__, getattr(instance, name, None)
    parameters = list(inspect.signature(getattr(base, name)).parameters)[1:]
    remedy = f"Give it the parameters of {base.__name__}.{name}."
    if not callable(method):
        return f"{owner}.{name} is {method!r}, expected a method. {remedy}"
    function = method.__func__ if inspect.ismethod(method) else method
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
