"""Modules that a function calls, found where Python holds them."""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from graphkit.errors import ConfigError
from graphkit.runners.containers import is_a, own_attributes


def held_weights(fn: Any) -> nn.Module | None:
    """Return the module that a function holds, or several of them by name; ``None`` without any.

    Raises:
        ConfigError: One is in training mode.
    """
    held = _modules_in(fn)
    for module in held.values():
        if module.training:
            raise ConfigError(
                f"{type(module).__name__} is in training mode, in which results may be random and "
                "depend on the whole batch. Call its eval() first.",
                field="fn",
            )
    if len(held) > 1:
        return nn.ModuleDict(held)
    return next(iter(held.values()), None)


def _modules_in(fn: Any) -> dict[str, nn.Module]:
    """Return the modules among a function's object, bound arguments and variables, by name."""
    if isinstance(fn, nn.Module):
        return {type(fn).__name__: fn}
    if isinstance(fn, partial):
        bound = {f"argument_{index}": value for index, value in enumerate(fn.args)}
        return {**_modules_in(fn.func), **_modules_among({**bound, **fn.keywords})}
    owner: Any = fn.__self__ if is_a(fn, MethodType) else None
    if is_a(owner, nn.Module):
        return {type(owner).__name__: owner}
    try:
        variables = inspect.getclosurevars(fn)
    except (TypeError, ValueError):  # a built-in, or a variable without a value
        return {}
    return _modules_among({**own_attributes(owner), **variables.globals, **variables.nonlocals})


def _modules_among(values: dict[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in values.items() if is_a(value, nn.Module)}
