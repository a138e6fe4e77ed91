"""Let a model of transformers run over graphkit's pools.

transformers keeps latents in its cache, and expands those of all tokens before it attends. Here
the cache takes the latents of the rows, and returns one for the module to expand, which nothing
reads: absorbed projections attend.

An indexer selects the keys that a row attends to (DeepSeek Sparse Attention). In transformers it
knows one sequence per row of its batch, and keeps its keys in the cache of the model. Here its
batch is the requests of a step, padded to the most rows of one, and the cache returns the index
keys of each request.

Suffixes: B requests, W most rows of a request, T rows, L positions, I elements of an index key, K
selected keys.

LongRoPE and dynamic NTK choose one set of frequencies for all rows of a forward, by the largest
position among them (``dynamic_rope_update`` in ``modeling_rope_utils`` of transformers). A forward
of graphkit holds several requests and their drafts, so that the frequencies of a request would
depend on the others. Up to a known length, the frequencies are always the initial ones.
"""

# ruff: noqa: N806 - suffixes of tensor names are dimensions

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from graphkit.engine.attention import AbsorbedProjections
from graphkit.models import experts
from graphkit.models.cache import IndexCache, LatentCache, PastLength
from graphkit.models.forward import IMPLEMENTATION
from graphkit.models.fusion import fuse_modules
from graphkit.models.fusion.latents import LatentAttention
from graphkit.models.fusion.observation import Run, random_logits
from graphkit.models.layout import IndexLayer, ModelLayout, output_head
from graphkit.models.probe import learn_layout
from graphkit.models.running import AttentionCall, LatentRows, SelectedKeys, running_forward


def convert_latents(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules with latent attention that are not replaced attend over latents; in place."""
    for layer in layout.attention:
        module = model.get_submodule(layer.name)
        if layer.latent is not None and not isinstance(module.forward, LatentAttention):
            projection = model.get_submodule(layer.latent.projection)
            sizes = layer.heads, layer.key_size - layer.latent.rotated_size
            argument = layer.latent.cache_argument
            module.forward = _over_latents(module.forward, projection, sizes, argument)


def _over_latents(
    forward: Callable[..., Any], projection: nn.Module, sizes: tuple[int, int], argument: str
) -> Callable[..., Any]:
    """Return a forward whose attention gets the latents that it passes to its cache."""

    def run(*args: Any, **kwargs: Any) -> Any:
        running, cache = running_forward(), LatentCache()
        projections = AbsorbedProjections(projection.get_parameter("weight"), *sizes)

        def attend(call: AttentionCall) -> torch.Tensor:
            if cache.rows is not None:
                call = replace(call, latents=LatentRows(*cache.rows, projections))
            return running.attend(call)

        with replace(running, attend=attend).running():
            return forward(*args, **kwargs | {argument: cache})

    return run


def pass_mask(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Pass a mask to a model with indexers, whose layers read it before they select; in place.

    It hides no key. A mask of four dimensions reaches the layers as it is.
    """
    if layout.indexers:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        model.forward = partial(model.forward, attention_mask=mask)


def convert_indexers(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the indexers of a model run over the pools of the running batch; in place."""
    for number, layer in enumerate(layout.indexers):
        module = model.get_submodule(layer.name)
        module.forward = PooledIndexer(module.forward, layer, number)


class PooledIndexer:
    """An indexer over the index keys of the running batch."""

    def __init__(self, forward: Callable[..., Any], layer: IndexLayer, number: int) -> None:
        self._forward, self._layer, self._number = forward, layer, number

    def __call__(self, *args: Any, **kwargs: Any) -> SelectedKeys:
        """Return the keys that rows select.

        Takes the arguments of the indexer, whose rows are [1, T, ...] and whose mask is boolean.
        """
        batch = running_forward().index
        assert batch is not None, "the forward of a model with indexers has index keys"
        layout, rows = batch.layout, len(batch.out_cache_loc)

        def by_request(argument: torch.Tensor) -> torch.Tensor:
            if argument.dtype == torch.bool:
                return layout.visible_BWL
            return layout.pad(argument[0]) if argument.shape[:2] == (1, rows) else argument

        args, kwargs = tree_map_only(torch.Tensor, by_request, (args, kwargs))
        kwargs[self._layer.cache_argument] = IndexCache(batch, self._number)
        position_BWK = self._forward(*args, **kwargs).long()
        is_seen_BWK = layout.visible_BWL.gather(2, position_BWK)
        position_BWK = position_BWK.masked_fill(~is_seen_BWK, -1).sort(descending=True).values
        return SelectedKeys(layout.pack(position_BWK + 1) - 1)


_FIXED = "default"
"""A type of rotation for which ``dynamic_rope_update`` leaves the frequencies as they are."""


def fix_rotations(model: PreTrainedModel) -> None:
    """Let rotations that follow the largest position keep their initial frequencies, in place.

    They then read no position on the host. Within ``rotation_limit`` and the positions of the
    model, they are those of transformers. Changed frequencies become buffers of this model alone,
    since a copy of the model that shares its tensors still writes into the old ones.
    """
    for module in model.modules():
        types = getattr(module, "rope_type", None)  # of the module, or by type of layer
        if isinstance(types, Mapping):
            changed = [layer for layer in types if _keep_frequencies(module, layer, types[layer])]
            if changed:
                fixed: Any = {**types, **dict.fromkeys(changed, _FIXED)}
                module.rope_type = fixed
        elif isinstance(types, str) and _keep_frequencies(module, None, types):
            module.rope_type = _FIXED  # type: ignore[assignment]


def rotation_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions share the initial frequencies of LongRoPE.

    It is the least ``original_max_position_embeddings`` of the model's types of layers, which
    ``longrope_frequency_update`` of transformers compares with the largest position. ``None`` if
    there is no LongRoPE. Dynamic NTK keeps its frequencies for all ``max_position_embeddings``.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [settings for settings in parameters.values() if isinstance(settings, Mapping)]
    return min(
        (
            settings["original_max_position_embeddings"]
            for settings in by_layer_type or [parameters]
            if settings.get("rope_type") == "longrope"
        ),
        default=None,
    )


def _keep_frequencies(module: nn.Module, layer_type: str | None, rope_type: str) -> bool:
    """Give a module its initial frequencies if they follow the largest position; else return False.

    The names of the buffers are those that ``dynamic_rope_update`` reads.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    initial = getattr(module, f"{prefix}original_inv_freq", None)
    if initial is None or not ("dynamic" in rope_type or rope_type == "longrope"):
        return False
    current = getattr(module, f"{prefix}inv_freq")
    module.register_buffer(f"{prefix}inv_freq", initial.to(current, copy=True), persistent=False)
    return True


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
    parts = (getattr(model.config, name) for name in model.config.sub_configs)
    for config in (model.config, *filter(None, parts)):  # a part may be absent, such as audio
        config._attn_implementation = IMPLEMENTATION
    with suppress(ValueError):  # the model has no experts, or one form of them
        model.set_experts_implementation(experts.IMPLEMENTATION)
        experts.learn_gates(model)
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
            latents={
                model.get_submodule(layer.name): layer
                for layer in layout.attention
                if layer.latent is not None
            },
            kept=[] if run else [output_head(model)],
        )  # fmt: skip
    convert_latents(model, layout)
    convert_indexers(model, layout)
    if not layout.recurrent:
        return layout
    from graphkit.models.recurrent import convert_mixers

    return convert_mixers(model, layout)


def _replace_past_lengths(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the modules that read the length of the cache read the running positions; in place.

    Llama 4 scales queries by their position, which it counts from the length of the cache.
    """
    arguments = {layer.name: layer.length_argument for layer in layout.attention}
    for name, argument in arguments.items():
        if argument:
            module = model.get_submodule(name)
            module.forward = partial(_with_length, module.forward, argument)


def _with_length(forward: Callable[..., Any], argument: str, *args: Any, **kwargs: Any) -> Any:
    """Run a forward whose cache has the running positions as its length."""
    past = PastLength(running_forward().positions)
    return forward(*args, **kwargs | {argument: past})
