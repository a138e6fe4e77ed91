"""Modules that a function calls, found where Python holds them."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphkit.errors import ConfigError
from graphkit.runners.containers import is_a
from graphkit.runners.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots


def held_weights(fn: Any) -> nn.Module | None:
    """Return the module that a function holds, or several of them by name; ``None`` without any.

    Raises:
        ConfigError: One is in training mode.
    """
    held = _modules_in(fn)
    for module in held.values():
        training = next((inner for inner in module.modules() if inner.training), None)
        if training is not None:
            raise ConfigError(
                f"{type(training).__name__} is in training mode, in which results may be random "
                "and depend on the whole batch. Call its eval() first.",
                field="fn",
            )
    if len(held) > 1:
        return nn.ModuleDict(held)
    return next(iter(held.values()), None)


def _modules_in(fn: Any) -> dict[str, nn.Module]:
    """Return the modules that a function is, is bound to or can reach, without those in others."""
    owner: Any = getattr(fn, "__self__", fn) if not is_a(fn, nn.Module) else fn
    if is_a(owner, nn.Module):
        return {type(owner).__name__: owner}
    held: dict[str, nn.Module] = {}
    inner: set[nn.Module] = set()
    objects = ReachableObjects(walk_roots(fn), SEARCH_DEPTH)
    for _, key, module in objects.values_of(nn.Module):
        if module not in inner:
            inner |= {*module.modules()}
            name = key if is_a(key, str) and "." not in key else type(module).__name__
            held[name if name not in held else f"{name}_{len(held)}"] = module
    return held
