"""Attention modules that read from the cache how many tokens precede their rows.

Llama 4 scales queries by their position, which it counts from the length of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from graphkit.hf.attention import running_forward
from graphkit.hf.cache import PastLength
from graphkit.hf.layout import ModelLayout


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
