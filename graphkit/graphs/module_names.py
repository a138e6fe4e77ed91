"""The path of a module that is running."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_COMPILED = "_orig_mod"
"""Where torch.compile keeps the module that it puts another one around."""


class ModuleNames:
    """Names modules as they run, one inside the other.

    A module is found by its place in a declared model, else by the declared name of a weight in it,
    else by its place in the module that runs around it, else by its class. Of one with several
    places, that in the module around it is meant, else the first.

    Args:
        declared: A model, or weights by name.
    """

    def __init__(self, declared: nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        # Weak, since a module that a forward made may die, and the next one have its id.
        self._paths: MutableMapping[nn.Module, tuple[str, ...]] = WeakIdKeyDictionary()
        self._weights: dict[int, str] = {}
        self._running: list[tuple[nn.Module, str]] = []
        if isinstance(declared, nn.Module):
            self._add(_as_written(declared), "")
        elif declared is not None:
            self._weights = {weight.data_ptr(): name for name, weight in declared.items()}
            self._weights.pop(0, None)  # of what has no memory of its own

    def enter(self, module: nn.Module) -> str:
        """The path of a module whose forward begins."""
        path = self._path(_as_written(module))
        self._running.append((module, path))
        return path

    def leave(self, module: nn.Module) -> bool:
        """The forward of a module ends; false if it was not seen to begin."""
        was_seen = bool(self._running) and self._running[-1][0] is module
        if was_seen:
            self._running.pop()
        return was_seen

    def start_over(self) -> None:
        """No module runs: whatever ran last may have been cut off."""
        self._running.clear()

    def _path(self, module: nn.Module) -> str:
        if module not in self._paths:
            path = self._by_weight(module)
            if path is None:
                path = self._by_parent(module) or type(module).__name__
            self._add(module, path)
        first, *others = self._paths[module]
        for _, around in reversed(self._running if others else ()):
            for path in (first, *others):
                if path.startswith(f"{around}."):
                    return path
        return first

    def _add(self, module: nn.Module, path: str) -> None:
        """Name a module and all below it that have no name yet."""
        found: MutableMapping[nn.Module, tuple[str, ...]] = WeakIdKeyDictionary()
        for name, child in module.named_modules(remove_duplicate=False):
            full = _joined(path, name) or type(module).__name__
            found[child] = (*found.get(child, ()), full)
        for child, paths in found.items():
            self._paths.setdefault(child, paths)

    def _by_weight(self, module: nn.Module) -> str | None:
        """Empty for the model that all the weights are of."""
        if not self._weights:  # some parameters refuse to say where they are
            return None
        for name, weight in module.named_parameters():
            declared = f".{self._weights.get(weight.data_ptr(), '')}"
            if declared.endswith(f".{name}"):
                return declared.removesuffix(f".{name}")[1:]
        return None

    def _by_parent(self, module: nn.Module) -> str:
        """For modules that came to their parent after it was named."""
        for parent, path in reversed(self._running):
            for name, child in parent.named_modules():
                if child is module:
                    return _joined(path, name)
        return ""


def _as_written(module: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(module, _COMPILED, module)
    return inner


def _joined(path: str, name: str) -> str:
    """A path of what lies below, as if nothing were compiled."""
    return ".".join(part for part in (path, *name.split(".")) if part not in ("", _COMPILED))
