"""Let a model of transformers run over graphkit's pools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from graphkit.models import experts
from graphkit.models.attention import IMPLEMENTATION
from graphkit.models.cache import PastLength
from graphkit.models.fusion import fuse_modules
from graphkit.models.fusion.observation import Run, random_logits
from graphkit.models.indexer import convert_indexers, pass_mask
from graphkit.models.latent import convert_latents
from graphkit.models.layout import ModelLayout, output_head
from graphkit.models.probe import learn_layout
from graphkit.models.recurrent import convert_mixers
from graphkit.models.rotation import fix_rotations
from graphkit.models.running import running_forward

PREPARED = "_graphkit_is_prepared"
"""Attribute of a model that ``prepare_model`` has changed."""


def prepare_model(
    model: PreTrainedModel,
    *,
    fuse: bool = True,
    owner: nn.Module | None = None,
    run: Run | None = None,
) -> ModelLayout:
    """Let a model run over graphkit's pools, in place, and return its layers with state.

    Args:
        model: The model.
        fuse: See ``load``.
        owner: A module that has the model, and is fused with it; ``None`` for the model alone.
        run: Runs the owner; ``None`` runs the model, which is then a language model.

    Raises:
        ConfigError: See ``load``.
    """
    setattr(model, PREPARED, True)  # not its configuration, which other models may share
    for config in (
        model.config,
        *(getattr(model.config, name) for name in model.config.sub_configs),
    ):
        config._attn_implementation = IMPLEMENTATION
    with suppress(ValueError):  # the model has no experts, or one form of them
        model.set_experts_implementation(experts.IMPLEMENTATION)
    fix_rotations(model)
    layout = learn_layout(model)
    # Before the fusion, which leaves these modules as they are.
    _replace_past_lengths(model, layout)
    pass_mask(model, layout)
    if fuse:
        text = model.config.get_text_config(decoder=True)
        layout = fuse_modules(
            owner or model, layout, run or partial(random_logits, model), model.device,
            longest=getattr(text, "max_position_embeddings", None),
            kept=[] if run else [output_head(model)],
        )  # fmt: skip
    convert_latents(model, layout)
    convert_mixers(model, layout)
    convert_indexers(model, layout)
    return layout


def _replace_past_lengths(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules that read the length of the cache read the running positions; in place.

    Llama 4 scales queries by their position, which it counts from the length of the cache.
    """
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
