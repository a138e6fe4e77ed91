"""Latent attention of a transformers model over pools of latents.

transformers keeps latents in its cache, and expands those of all tokens before it attends. Here
the cache takes the latents of the rows, and returns one for the module to expand, which nothing
reads: absorbed projections attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from graphkit.attention import AbsorbedProjections
from graphkit.hf.attention import AttentionCall, LatentRows, attending, running_forward
from graphkit.hf.cache import LatentCache
from graphkit.hf.layout import ModelLayout


def convert_latents(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules with latent attention attend over latents; in place."""
    modules = dict(model.named_modules())
    for layer in layout.attention:
        if layer.latent is not None:
            weight = modules[layer.latent.projection].get_parameter("weight")
            size = layer.key_size - layer.latent.rotated_size
            projections = AbsorbedProjections(weight, layer.heads, size)
            module = modules[layer.name]
            module.forward = _Latent(module.forward, projections, layer.latent.cache_argument)


class _Latent:
    def __init__(
        self, forward: Callable[..., Any], projections: AbsorbedProjections, argument: str
    ) -> None:
        self._forward, self._projections, self._argument = forward, projections, argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, cache = running_forward(), LatentCache()

        def attend(call: AttentionCall) -> torch.Tensor:
            if cache.rows is not None:
                call = replace(call, latents=LatentRows(*cache.rows, self._projections))
            return running.attend(call)

        with attending(attend, running.positions):
            return self._forward(*args, **kwargs | {self._argument: cache})
