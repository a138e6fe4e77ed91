"""Attention modules that read from the cache how many tokens precede their rows.

Llama 4 scales queries by their position, which it counts from the length of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from graphkit.hf.attention import running_forward
from graphkit.hf.layout import ModelLayout


class PastLength:
    """A cache with a length and no contents, for such a module.

    Args:
        positions: Position of each row in its request, [T].
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:  # noqa: ARG002 - of transformers
        """Return the difference between the position and the index of each row, [T]."""
        return self._positions - torch.arange(
            len(self._positions), dtype=self._positions.dtype, device=self._positions.device
        )

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return keys and values; graphkit's attention stores them."""
        return keys, values


def replace_past_lengths(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules that read the length of the cache read the running positions; in place."""
    modules = dict(model.named_modules())
    arguments = {layer.name: layer.length_argument for layer in layout.attention}
    for name, argument in arguments.items():
        if argument:
            module = modules[name]
            module.forward = _WithLength(module.forward, argument)


class _WithLength:
    def __init__(self, forward: Callable[..., Any], argument: str) -> None:
        self._forward, self._argument = forward, argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        past = PastLength(running_forward().positions)
        return self._forward(*args, **kwargs | {self._argument: past})
