"""Rotations whose frequencies follow the largest position of a forward.

LongRoPE and dynamic NTK choose one set of frequencies for all rows of a forward, by the largest
position among them (``dynamic_rope_update`` in ``modeling_rope_utils`` of transformers). A forward
of graphkit holds several requests and their drafts, so that the frequencies of a request would
depend on the others. Up to a known length, the frequencies are always the initial ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

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
