"""Published layouts of EAGLE heads: their configurations and the names of their tensors.

The authors' heads have ``fc`` and ``layers.0``. Speculators has ``fusion_fc`` and ``transformer``,
and a nested ``transformer_layer_config``. Both have no input norm and no final norm.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.heads.settings import as_object, check_settings

NESTED, _CLASS = "transformer_layer_config", "transformer_layer_architecture"
_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_TYPES = {f"{name}DecoderLayer": name.lower() for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (False,), "use_input_layernorm_in_first_layer": (False,),
    "use_last_layernorm": (False,),
}  # fmt: skip


def canonical_name(name: str) -> str:
    """Return the name in the authors' layout."""
    name = name.removeprefix("model.")
    for old, new in _NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def layer_config(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the decoder layer.

    Raises:
        CheckpointError: A setting is malformed, or changes what the head computes.
    """
    check_settings(data, {NESTED, _CLASS, "eagle_config"}, _ALLOWED)
    check_settings(as_object(data, "eagle_config"), (), _ALLOWED, "eagle_config")
    return nested_layer(data)


def nested_layer(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the layer: those of Speculators' nested object, or all.

    Raises:
        CheckpointError: The object is malformed, or has settings that graphkit does not compute.
    """
    nested, kind = as_object(data, NESTED), data.get(_CLASS)
    check_settings(nested, (), {}, NESTED)
    if not nested:
        return data
    if kind is not None and kind not in _TYPES:
        raise CheckpointError(
            f"config.json of the draft head has {_CLASS} {short_repr(kind)}, but graphkit runs "
            "only "
            f"{', '.join(_TYPES)}. Use a head with one of these layers."
        )
    return {"model_type": _TYPES.get(str(kind), "llama"), **nested}
