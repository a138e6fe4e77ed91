"""Published layouts of EAGLE-3 heads: their configurations and the names of their tensors.

The authors' repository, SpecForge and SGLang have ``midlayer.*`` and, in ``eagle_config``, layers
whose outputs the head reads. Speculators and vLLM have ``layers.0.*``, a nested
``transformer_layer_config``, and layers whose inputs the head reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.eagle_layout import NESTED
from graphkit.models.heads.settings import as_object, check_settings

_LAYER_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_FLAGS = ("norm_before_residual", "use_aux_hidden_state")
_USED = (*_FLAGS, _LAYER_IDS, _NESTED, "draft_vocab_size", NESTED)
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "num_aux_hidden_states": (3,), "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}  # fmt: skip


def is_eagle3(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an EAGLE-3 head: it alone has a ``hidden_norm``."""
    return any(".hidden_norm." in name for name in names)


def canonical_name(name: str) -> str:
    """Return the name in the authors' layout."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def settings(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of a head, those of the nested ``eagle_config`` among them.

    Raises:
        CheckpointError: A setting is malformed, or changes what the head computes.
    """
    nested = as_object(data, _NESTED)
    check_settings(data, _USED, _ALLOWED)
    check_settings(nested, _USED, _ALLOWED, _NESTED)
    for name in _FLAGS:
        outer, inner = data.get(name), nested.get(name)
        if None not in (outer, inner) and outer != inner:
            raise CheckpointError(
                f"config.json sets {name} to {short_repr(outer)}, and {_NESTED} to "
                f"{short_repr(inner)}. Correct one."
            )
    merged = {**data, **{name: value for name, value in nested.items() if value is not None}}
    if merged.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            "config.json sets use_aux_hidden_state to false, but EAGLE-3 reads three target "
            "layers. Use a head that does."
        )
    return merged


def aux_layers(data: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the target layers whose inputs the head reads; ``None`` if the file has none.

    Raises:
        CheckpointError: They are not ints of at least 0, or there are none in the list.
    """
    inputs, is_output = data.get(_LAYER_IDS), False
    if inputs is None:
        inputs, is_output = as_object(data, _NESTED).get(_LAYER_IDS), True
    if inputs is None:
        return None
    if not isinstance(inputs, list) or not all(type(each) is int for each in inputs):
        raise CheckpointError(
            f"config.json: {_LAYER_IDS} must be a list of ints, got {short_repr(inputs)}. Correct "
            "config.json."
        )
    if not inputs:
        raise CheckpointError(
            f"config.json: {_LAYER_IDS} is an empty list, which does not say what the head reads. "
            "Name its three layers, or remove the key for the layers of published heads: 2, the "
            "middle and the third to last."
        )
    return tuple(each + is_output for each in inputs)


def config_entries(head: Eagle3Head) -> dict[str, object]:
    """Return the entries of ``config.json`` that a head has beside those of its layer."""
    return {
        _LAYER_IDS: list(head.aux_layers),
        "draft_vocab_size": head.config.vocab_size if head.d2t is None else len(head.d2t),
        "norm_before_residual": head.midlayer.norm_before_residual,
    }


def flag(data: Mapping[str, object], key: str) -> bool:
    """Return a boolean; absent or ``None`` is False.

    Raises:
        CheckpointError: The value is not a boolean.
    """
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {key} must be true or false, got {short_repr(value)}. Correct "
            "config.json."
        )
    return bool(value)
