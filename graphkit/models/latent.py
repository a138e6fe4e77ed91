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
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine.attention import AbsorbedProjections
from graphkit.models.cache import LatentCache
from graphkit.models.layout import ModelLayout
from graphkit.models.running import AttentionCall, LatentRows, running_forward


def convert_latents(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules with latent attention attend over latents; in place."""
    modules = dict(model.named_modules())
    for layer in layout.attention:
        if layer.latent is not None:
            projection = modules[layer.latent.projection]
            sizes = layer.heads, layer.key_size - layer.latent.rotated_size
            module = modules[layer.name]
            module.forward = _Latent(module.forward, projection, sizes, layer.latent.cache_argument)


class _Latent:
    def __init__(
        self,
        forward: Callable[..., Any],
        projection: nn.Module,
        sizes: tuple[int, int],
        argument: str,
    ) -> None:
        self._forward, self._projection, self._argument = forward, projection, argument
        self._sizes = sizes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, cache = running_forward(), LatentCache()
        projections = AbsorbedProjections(self._projection.get_parameter("weight"), *self._sizes)

        def attend(call: AttentionCall) -> torch.Tensor:
            if cache.rows is not None:
                call = replace(call, latents=LatentRows(*cache.rows, projections))
            return running.attend(call)

        with replace(running, attend=attend).running():
            return self._forward(*args, **kwargs | {self._argument: cache})
