"""Published layouts of DFLASH heads: their configurations and the names of their tensors.

Transformers has ``encoder.*``, and the settings of drafts and of layers side by side. The authors'
heads have ``fc`` and ``hidden_norm``, and a nested ``dflash_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle_layout import NESTED
from graphkit.models.heads.settings import as_object, check_settings
from graphkit.models.heads.sources import HeadSources

MODEL_TYPE, ARCHITECTURE = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"
_NESTED = "dflash_config"
_USED = ("block_size", "mask_token_id", "target_layer_ids", _NESTED)
_WINDOWS = ("swa_window_size", "sliding_window")
"""Names of windows in the nested settings. Beside those, the second one is of layer_types."""
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def is_dflash(data: Mapping[str, object]) -> bool:
    """Return whether ``config.json`` describes a DFLASH head: it alone has blocks."""
    return "block_size" in data or _NESTED in data


def canonical_name(name: str) -> str:
    """Return the name in the layout of transformers."""
    name = name.removeprefix("model.")
    return _NAMES.get(name, name)


def layer_config(data: Mapping[str, object], target: HeadSources) -> Mapping[str, object]:
    """Return the configuration of the layers, as that of a Qwen3 model.

    Args:
        data: ``config.json``.
        target: Sizes of the target. Its vocabulary is that of a file without one.

    Raises:
        CheckpointError: A setting changes what the head computes, or the target has another depth.
    """
    if NESTED in data:
        raise CheckpointError(
            "config.json of the draft head is a DFLASH head in the layout of Speculators, which "
            "graphkit does not read. Convert it to the layout of the authors or of transformers."
        )
    nested = as_object(data, _NESTED)
    for settings, where in ((data, "config.json"), (nested, _NESTED)):
        allowed: dict[str, tuple[object, ...]] = {"num_target_layers": (target.num_hidden_layers,)}
        for name in _WINDOWS if settings is nested else _WINDOWS[:1]:
            allowed[name] = (0, -1)
        check_settings(settings, _USED, allowed, where)
    merged = {**data, **nested}
    kinds = merged.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types is {short_repr(kinds)}, but only full_attention is "
            "supported. Use a "
            "head without windows."
        )
    if not kinds and data.get("model_type") == MODEL_TYPE:  # the default of transformers
        raise CheckpointError(
            "config.json has no layer_types, so that all layers have a window, which is not "
            "supported. Use a head without windows."
        )
    return {"vocab_size": target.vocab_size, **merged, "model_type": "qwen3"}


def draft_settings(data: Mapping[str, object]) -> dict[str, Any]:
    """Return ``target_layer_ids``, ``block_size`` and ``mask_token_id`` of a head.

    Raises:
        CheckpointError: One is missing or malformed.
    """
    found = {**data, **as_object(data, _NESTED)}
    layers = found.get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"config.json: target_layer_ids must be a list of ints, got {short_repr(layers)}. "
            "Correct "
            "config.json."
        )
    return {
        "target_layer_ids": layers,
        "block_size": _integer(found, "block_size"),
        "mask_token_id": _integer(found, "mask_token_id"),
    }


def _integer(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if type(value) is not int:
        raise CheckpointError(
            f"config.json: {name} must be an int, got {short_repr(value)}. Correct config.json."
        )
    return value


def config_entries(head: DFlashHead) -> dict[str, object]:
    """Return the entries of ``config.json`` that a head has beside those of its layers."""
    config = head.config
    return {
        "model_type": MODEL_TYPE,
        "pad_token_id": None,  # the default of transformers is outside of small vocabularies
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_parameters["rope_theta"],
        },
        "target_layer_ids": list(head.target_layer_ids),
        "block_size": head.block_size,
        "mask_token_id": head.mask_token_id,
    }
