"""Published layouts of draft heads: their configurations and the names of their tensors.

EAGLE: the authors' heads have ``fc`` and ``layers.0``. Speculators has ``fusion_fc`` and
``transformer``, and a nested ``transformer_layer_config``. Both have no input norm and no final
norm.

EAGLE-3: the authors' repository, SpecForge and SGLang have ``midlayer.*`` and, in ``eagle_config``,
layers whose outputs the head reads. Speculators and vLLM have ``layers.0.*``, a nested
``transformer_layer_config``, and layers whose inputs the head reads.

DFLASH: transformers has ``encoder.*``, and the settings of drafts and of layers side by side. The
authors' heads have ``fc`` and ``hidden_norm``, and a nested ``dflash_config``; those of DFLASH 2
(``DFlash2DraftModel``) also convolutions and a ``candidate_selector``. DSPARK (``Qwen3DSparkModel``
of DeepSpec) has the names of the authors of DFLASH, all settings side by side, and ``markov_head``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.heads.config import (
    TYPES,
    WINDOWED,
    check_layer_types,
    check_settings,
    layer_count,
    setting,
)
from graphkit.models.heads.dflash_parts import BlockOptions
from graphkit.models.heads.layers import HeadSources

NESTED, _CLASS = "transformer_layer_config", "transformer_layer_architecture"
_EAGLE_CONFIG = "eagle_config"
_EAGLE_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_TYPES = {f"{name}DecoderLayer": name.lower() for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_EAGLE_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (False,), "use_input_layernorm_in_first_layer": (False,),
    "use_last_layernorm": (False,),
}  # fmt: skip


def eagle_name(name: str) -> str:
    """Return the name in the authors' layout."""
    name = name.removeprefix("model.")
    for old, new in _EAGLE_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def eagle_layer_config(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the decoder layer.

    Raises:
        CheckpointError: A setting is malformed, or changes what the head computes.
    """
    nested = setting(data, _EAGLE_CONFIG, dict, {})
    check_settings(data, {NESTED, _CLASS, _EAGLE_CONFIG}, _EAGLE_ALLOWED)
    check_settings(nested, (), _EAGLE_ALLOWED, _EAGLE_CONFIG)
    return nested_layer(_merged(data, nested, _EAGLE_CONFIG))


def _merged(
    data: Mapping[str, object], nested: Mapping[str, object], where: str
) -> dict[str, object]:
    """Return settings with those of a nested object; ``where`` is its name.

    Raises:
        CheckpointError: They contradict each other.
    """
    for name in sorted(data.keys() & nested.keys()):
        outer, inner = data[name], nested[name]
        if outer not in (None, []) and inner not in (None, []) and outer != inner:
            raise CheckpointError(
                f"config.json sets {name} to {short_repr(outer)}, and {where} to "
                f"{short_repr(inner)}. Correct one."
            )
    return {**data, **{name: value for name, value in nested.items() if value is not None}}


def nested_layer(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the layer: those of Speculators' nested object, or all.

    Raises:
        CheckpointError: The object is malformed, or has settings that graphkit does not compute.
    """
    nested, kind = setting(data, NESTED, dict, {}), data.get(_CLASS)
    check_settings(nested, (), {}, NESTED)
    if not nested:
        return data
    if kind is not None and kind not in _TYPES:
        raise CheckpointError(
            f"config.json of the draft head has {_CLASS} {short_repr(kind)}, but graphkit runs "
            f"only {', '.join(_TYPES)}. Use a head with one of these layers."
        )
    return {"model_type": _TYPES.get(str(kind), "llama"), **nested}


_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "use_aux_hidden_state")
_EAGLE3_USED = (*_FLAGS, _LAYER_IDS, _EAGLE_CONFIG, "draft_vocab_size", NESTED)
_EAGLE3_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "num_aux_hidden_states": (3,), "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}  # fmt: skip


def is_eagle3(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an EAGLE-3 head: it alone has a ``hidden_norm``."""
    return any(".hidden_norm." in name for name in names)


def eagle3_name(name: str) -> str:
    """Return the name in the authors' layout."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def eagle3_settings(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the eagle3_settings of a head, those of the nested ``eagle_config`` among them.

    Raises:
        CheckpointError: A setting is malformed, or changes what the head computes.
    """
    nested = setting(data, _EAGLE_CONFIG, dict, {})
    check_settings(data, _EAGLE3_USED, _EAGLE3_ALLOWED)
    check_settings(nested, _EAGLE3_USED, _EAGLE3_ALLOWED, _EAGLE_CONFIG)
    merged = _merged(data, nested, _EAGLE_CONFIG)
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
        inputs, is_output = setting(data, _EAGLE_CONFIG, dict, {}).get(_LAYER_IDS), True
    if inputs is None:
        return None
    inputs = setting({_LAYER_IDS: inputs}, _LAYER_IDS, list)
    if not inputs:
        raise CheckpointError(
            f"config.json: {_LAYER_IDS} is an empty list, which does not say what the head reads. "
            "Name its three layers, or remove the key for the layers of published heads: 2, the "
            "middle and the third to last."
        )
    return tuple(each + is_output for each in inputs)


MODEL_TYPE = "muse_glimmer_assistant"
_DFLASH_CONFIG = "dflash_config"
_SIZES = ("markov_rank", "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_FACTORS = ("output_multiplier", "final_logit_softcapping")
_DFLASH_USED = (
    "block_size", "mask_token_id", "target_layer_ids", _DFLASH_CONFIG, *_SIZES, *_FACTORS,
    "markov_head_type", "sample_from_anchor", "is_causal", "use_sliding_window",
    # The first is of training. The others are of the confidence head, see load_dflash_head.
    "num_anchors", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
_DFLASH_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "projector_type": ("dflash", "dspark"), "attention_mode": ("gqa",),
    "input_embedding_scale": (1,),
}  # fmt: skip
_WINDOWS = ("swa_window_size", "sliding_window")
"""Names of windows in the nested settings. Beside those, the second one is of layer_types."""
_DFLASH_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def is_dflash(data: Mapping[str, object]) -> bool:
    """Return whether ``config.json`` describes a DFLASH head: it alone has blocks."""
    return "block_size" in data or _DFLASH_CONFIG in data


def dflash_name(name: str) -> str:
    """Return the name in the layout of transformers."""
    name = name.removeprefix("model.")
    return f"{name}.weight" if name.endswith("_codebook") else _DFLASH_NAMES.get(name, name)


def dflash_layer_config(data: Mapping[str, object], target: HeadSources) -> Mapping[str, object]:
    """Return the configuration of the layers, as that of a Qwen3 model.

    Raises:
        CheckpointError: A setting changes what the head computes, or the target has another depth.
    """
    if NESTED in data:
        raise CheckpointError(
            "config.json of the draft head is a DFLASH head in the layout of Speculators, which "
            "graphkit does not read. Convert it to the layout of the authors or of transformers."
        )
    nested = setting(data, _DFLASH_CONFIG, dict, {})
    for settings, where in ((data, "config.json"), (nested, _DFLASH_CONFIG)):
        allowed = {**_DFLASH_ALLOWED, "num_target_layers": (target.num_hidden_layers,)}
        for name in _WINDOWS if settings is nested else _WINDOWS[:1]:
            allowed[name] = (0, -1)
        check_settings(settings, _DFLASH_USED, allowed, where)
    kind = data.get("model_type", "qwen3")
    if kind not in (*TYPES, MODEL_TYPE):
        raise CheckpointError(
            f"the draft head has model_type {short_repr(kind)}, but graphkit runs only DFLASH "
            "heads with layers of Qwen3. Use another head."
        )
    merged = {"vocab_size": target.vocab_size, **data, **nested, "model_type": "qwen3"}
    # Heads attend through masks of their own, see ``BlockOptions``.
    unused = ("layer_types", "sliding_window", "use_sliding_window")
    return {name: value for name, value in merged.items() if name not in unused}


def dflash_settings(data: Mapping[str, object]) -> dict[str, Any]:
    """Return ``target_layer_ids``, ``block_size`` and ``mask_token_id`` of a head.

    Raises:
        CheckpointError: One is missing or malformed.
    """
    found = _merged(data, setting(data, _DFLASH_CONFIG, dict, {}), _DFLASH_CONFIG)
    kind = f"{found.get('architectures')} {found.get('projector_type')}".lower()
    anchor = {"sample_from_anchor": "dspark" in kind} | found
    options: dict[str, Any] = {
        name: setting(found, name, int) for name in _SIZES if found.get(name)
    }
    options |= {
        name: setting(found, name, float) for name in _FACTORS if found.get(name) is not None
    }
    return {
        "target_layer_ids": setting(found, "target_layer_ids", list),
        "block_size": setting(found, "block_size", int),
        "mask_token_id": setting(found, "mask_token_id", int),
        "options": BlockOptions(
            sample_from_anchor=setting(anchor, "sample_from_anchor", bool, False),
            markov_head_type=str(found.get("markov_head_type") or "vanilla"),
            **options, **_windows(found),
        ),
    }  # fmt: skip


def _windows(data: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of ``BlockOptions`` about windows.

    In the authors' heads, layers with a window are causal unless ``is_causal`` is false, and a
    window has the row itself. In transformers no layer is causal, and it has not.

    Raises:
        CheckpointError: A setting is malformed, or the rows of a block are causal in other layers.
    """
    is_own, count = data.get("model_type") == MODEL_TYPE, layer_count(data)
    kinds, is_causal = data.get("layer_types"), data.get("is_causal")
    listed: Any = kinds or ([WINDOWED] * count if is_own else [])
    check_layer_types(listed)
    windowed = tuple(i for i, kind in enumerate(listed[:count]) if kind == WINDOWED)
    if setting(data, "is_causal", bool, False) and (is_own or len(windowed) < count):
        raise CheckpointError(
            "config.json sets is_causal to true, but rows of a block see each other in a layer "
            "without a window. Use a head whose blocks do."
        )
    if not windowed:
        return {}
    if not is_own and not setting(data, "use_sliding_window", bool, False):
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, but use_sliding_window is not true. "
            "Correct one of them."
        )
    return {
        "window": setting(data, "sliding_window", int) + is_own,
        "windowed_layers": windowed,
        "is_causal": not is_own and is_causal is not False,
    }
