"""Let a model of transformers run over graphkit's pools."""

from __future__ import annotations

from contextlib import suppress

from transformers import PreTrainedModel

from graphkit.hf import experts
from graphkit.hf.attention import IMPLEMENTATION
from graphkit.hf.fusion import fuse_modules
from graphkit.hf.indexer import convert_indexers, pass_mask
from graphkit.hf.latent import convert_latents
from graphkit.hf.layout import ModelLayout
from graphkit.hf.past_length import replace_past_lengths
from graphkit.hf.probe import learn_layout
from graphkit.hf.recurrent import convert_mixers
from graphkit.hf.rotation import fix_rotations


def prepare_model(model: PreTrainedModel, *, fuse: bool = True) -> ModelLayout:
    """Let a model run over graphkit's pools, in place, and return its layers with state.

    Args:
        model: The model.
        fuse: See ``load``.

    Raises:
        ConfigError: See ``load``.
    """
    for config in (
        model.config,
        *(getattr(model.config, name) for name in model.config.sub_configs),
    ):
        config._attn_implementation = IMPLEMENTATION
    with suppress(ValueError):  # the model has no experts, or one form of them
        model.set_experts_implementation(experts.IMPLEMENTATION)
    fix_rotations(model)
    layout = learn_layout(model)
    replace_past_lengths(model, layout)  # before the fusion, which leaves these modules as they are
    pass_mask(model, layout)
    if fuse:
        layout = fuse_modules(model, layout)
    convert_latents(model, layout)
    convert_mixers(model, layout)
    convert_indexers(model, layout)
    return layout
