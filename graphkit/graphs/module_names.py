"""Paths of running modules, and names of their tensors.

Private names of torch, checked on 2.11 and 2.13: ``nn.Module._call_impl``, whose frame has the
module that runs as ``self``, and ``_orig_mod`` of compiled modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from types import FrameType

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from graphkit.config import require_type
from graphkit.errors import InspectError, short_repr

_COMPILED = "_orig_mod"
"""The attribute in which torch.compile keeps the module that it wraps."""


class ModuleNames:
    """Names modules while they run, one inside the other.

    A module's name is, in this order: its path in the declared model; the declared name of one of
    its weights without the weight's own part; its path below the module that runs around it; its
    class. If a module has several paths, the one below the surrounding module is used, otherwise
    the first.

    Args:
        declared: A model, or weights by name.
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

    Args:
        stack: Frames, outermost first.

    Returns:
        Such as ``Llama.layers.0``; empty if no module runs.
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
