"""Published layouts of EAGLE-3 heads: their configurations and the names of their tensors.

The authors' repository, SpecForge and SGLang have ``midlayer.*`` and, in ``eagle_config``, layers
whose outputs the head reads. Speculators and vLLM have ``layers.0.*``, a nested
``transformer_layer_config``, and layers whose inputs the head reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graphkit.errors import CheckpointError
from graphkit.reference.eagle3 import Eagle3Head

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")
"""Options of newer heads, which add norms."""


def is_eagle3(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an EAGLE-3 head: it alone has a ``hidden_norm``."""
    return any(".hidden_norm." in name for name in names)


def canonical_name(name: str) -> str:
    """Return the name in the authors' layout."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def layer_config(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the decoder layer.

    Raises:
        CheckpointError: It is not an object, or the head has norms that are not supported.
    """
    if found := [key for key in _UNSUPPORTED if flag(data, key)]:
        raise CheckpointError(
            f"config.json sets {found[0]}, which is not supported. Use a head without it."
        )
    return _object(data, "transformer_layer_config") or data


def aux_layers(data: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the target layers whose inputs the head reads; ``None`` if the file has none.

    Raises:
        CheckpointError: They are not ints of at least 0, or the head reads the final hidden states.
    """
    outputs = _object(data, "eagle_config")
    if outputs.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            "config.json sets use_aux_hidden_state to false, but EAGLE-3 reads three target "
            "layers. Use a head that does."
        )
    inputs, is_output = data.get(_LAYER_IDS), False
    if inputs is None:
        inputs, is_output = outputs.get(_LAYER_IDS), True
    if inputs is None:
        return None
    if not isinstance(inputs, list) or not all(type(each) is int for each in inputs):
        raise CheckpointError(
            f"config.json: {_LAYER_IDS} must be a list of ints, got {inputs!r}. Correct "
            "config.json."
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
            f"config.json: {key} must be true or false, got {value!r}. Correct config.json."
        )
    return bool(value)


def _object(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"config.json: {key} must be an object, got {value!r}. Correct config.json."
        )
    return value
