"""Published layouts of DFLASH heads: their configurations and the names of their tensors.

Transformers has ``encoder.*``, and the settings of drafts and of layers side by side. The authors'
heads have ``fc`` and ``hidden_norm``, and a nested ``dflash_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphkit.errors import CheckpointError
from graphkit.reference.dflash import DFlashHead

MODEL_TYPE, ARCHITECTURE = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"
_NESTED = "dflash_config"
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def is_dflash(data: Mapping[str, object]) -> bool:
    """Return whether ``config.json`` describes a DFLASH head: it alone has blocks."""
    return "block_size" in data or _NESTED in data


def canonical_name(name: str) -> str:
    """Return the name in the layout of transformers."""
    name = name.removeprefix("model.")
    return _NAMES.get(name, name)


def layer_config(data: Mapping[str, object], vocab_size: int) -> Mapping[str, object]:
    """Return the configuration of the layers, as that of a Qwen3 model.

    Args:
        data: ``config.json``.
        vocab_size: Tokens of the target, if the file has none.

    Raises:
        CheckpointError: Layers have a window.
    """
    kinds = data.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types is {kinds!r}, but only full_attention is supported. Use a "
            "head without windows."
        )
    if not kinds and data.get("model_type") == MODEL_TYPE:  # the default of transformers
        raise CheckpointError(
            "config.json has no layer_types, so that all layers have a window, which is not "
            "supported. Use a head without windows."
        )
    return {"vocab_size": vocab_size, **data, "model_type": "qwen3"}


def draft_settings(data: Mapping[str, object]) -> dict[str, Any]:
    """Return ``target_layer_ids``, ``block_size`` and ``mask_token_id`` of a head.

    Raises:
        CheckpointError: One is missing or malformed.
    """
    nested = data.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(
            f"config.json: {_NESTED} must be an object, got {nested!r}. Correct config.json."
        )
    found = {**data, **nested}
    layers = found.get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"config.json: target_layer_ids must be a list of ints, got {layers!r}. Correct "
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
            f"config.json: {name} must be an int, got {value!r}. Correct config.json."
        )
    return value


def config_entries(head: DFlashHead) -> dict[str, object]:
    """Return the entries of ``config.json`` that a head has beside those of its layers."""
    config = head.config
    return {
        "model_type": MODEL_TYPE,
        "pad_token_id": None,  # the default of transformers is outside of small vocabularies
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "target_layer_ids": list(head.target_layer_ids),
        "block_size": head.block_size,
        "mask_token_id": head.mask_token_id,
    }
