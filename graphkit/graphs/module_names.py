"""The path of a module that is running."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class ModuleNames:
    """Names modules as they run, one inside the other.

    A module is found by its place in a declared model, else by the declared name of a weight in it,
    else by its place in the module that runs around it, else by its class.

    Args:
        declared: A model, or weights by name.
    """

    def __init__(self, declared: nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        self._paths: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        self._running: list[tuple[nn.Module, str]] = []
        if isinstance(declared, nn.Module):
            self._add(declared, "")
        elif declared is not None:
            self._weights = {weight.data_ptr(): name for name, weight in declared.items()}

    def enter(self, module: nn.Module) -> str:
        """The path of a module whose forward begins."""
        path = self._paths.get(id(module))
        if path is None:
            path = self._by_weight(module) or self._by_parent(module) or type(module).__name__
            self._add(module, path)
        self._running.append((module, path))
        return path

    def leave(self) -> None:
        """The forward of the module that was entered last ends."""
        self._running.pop()

    def _add(self, module: nn.Module, path: str) -> None:
        """Name a module and all below it that have no name yet."""
        for name, child in module.named_modules():
            full = ".".join(filter(None, (path, name))) or type(module).__name__
            self._paths.setdefault(id(child), full)

    def _by_weight(self, module: nn.Module) -> str:
        for name, weight in module.named_parameters():
            declared = self._weights.get(weight.data_ptr(), "")
            if declared.endswith(f".{name}"):
                return declared.removesuffix(f".{name}")
        return ""

    def _by_parent(self, module: nn.Module) -> str:
        """For modules that came to their parent after it was named."""
        for parent, path in reversed(self._running):
            for name, child in parent.named_modules():
                if child is module:
                    return f"{path}.{name}"
        return ""
