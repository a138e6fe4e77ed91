"""Projections of the same input as one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphkit.models.quantization import Linear


class MergedLinear(Linear):
    """Several linear layers of one input, their outputs side by side.

    One product reads the input once and is one kernel instead of several.

    Args:
        in_features: Width of the input.
        parts: Width of each layer's output by its name in a checkpoint.
        bias: Whether the layers have a bias.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class MergesProjections(nn.Module):
    """A module whose state dict has the parts of its merged layers, under their own names.

    ``state_dict`` returns views, so that weights copied into them arrive in the merged layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_split)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_merge)  # type: ignore[no-untyped-call]


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    for merged, parts, sizes in _tensors(module, prefix):
        if merged in state:
            state.update(zip(parts, state.pop(merged).split(sizes), strict=True))


def _merge(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for merged, parts, _sizes in _tensors(module, prefix):
        if all(name in state for name in parts):
            state[merged] = torch.cat([state.pop(name) for name in parts])


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield the key of each merged tensor, the keys of its parts and their rows."""
    for name, layer in module.named_children():
        if isinstance(layer, MergedLinear):
            for kind, _ in layer.named_parameters():
                parts = [f"{prefix}{part}.{kind}" for part in layer.parts]
                yield f"{prefix}{name}.{kind}", parts, list(layer.parts.values())
