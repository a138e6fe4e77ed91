"""The config.json of a draft head: each setting is used, has no effect, or is refused.

A setting that is dropped costs accepted drafts without a word, because the text stays right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from graphkit.config import require_int, require_type
from graphkit.errors import CheckpointError, ConfigError, short_repr

TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of transformers whose layers published heads have."""
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Types of transformers that draft from the keys and values of their target."""
LAYER_SETTINGS = frozenset({
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "partial_rotary_factor", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "rope_type",
    "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
})  # fmt: skip
"""Settings of the layers, which ``layer_config`` reads."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_ADVICE = "Use a draft head whose layers are those of Llama, Mistral, Qwen2 or Qwen3."
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_type": ("default", "llama3"),
    "use_sliding_window": (False,),
}
"""Values of settings with which a head computes what published ones do; ``None`` is one."""


def layer_config(data: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration of the layers of a head, of the class of its ``model_type``.

    A window of Mistral that is as long as the longest context is none.

    Args:
        data: ``config.json``. transformers supplies what it leaves out.

    Raises:
        CheckpointError: A value is missing, malformed or unsupported.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise CheckpointError(_unsupported("model_type", kind, TYPES))
    # Heads have one type of layers, and ``plain_tensors`` reads the settings of quantised weights.
    names = LAYER_SETTINGS - {"layer_types", "quantization_config"}
    if kind != "mistral":
        names -= {"sliding_window"}
    settings = {name: value for name, value in data.items() if name in names}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**deepcopy(settings))  # it changes them
    except Exception as error:  # transformers raises errors of many classes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"config.json cannot be read by transformers: {reason}") from error
    window = getattr(config, "sliding_window", None)
    if kind == "mistral" and window is not None and window >= config.max_position_embeddings:
        config.sliding_window = None
    try:
        check_layers(config)
    except ConfigError as error:
        raise CheckpointError(f"config.json is inconsistent: {error}") from error
    return config


def check_layers(config: PreTrainedConfig) -> None:
    """Check that draft heads can have layers of a configuration.

    Raises:
        ConfigError: It has another type, a value is out of range or unsupported, or two values
            contradict each other.
    """
    require_type("a draft head", "config", config, PreTrainedConfig, "a config of transformers")
    rope: Mapping[str, Any] = config.rope_parameters
    settings = {"rope_type": rope.get("rope_type", "default"), **vars(config), **rope}
    for name, allowed in {"model_type": TYPES, **_SUPPORTED}.items():
        value = config.model_type if name == "model_type" else settings.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(_unsupported(name, value, allowed), field=name)
    for name in _SIZES:
        require_int(
            type(config).__name__, name, head_dim(config) if name == "head_dim" else settings[name]
        )
    is_llama3, factors = rope.get("rope_type") == "llama3", ("low_freq_factor", "high_freq_factor")
    for name in ("rms_norm_eps", "rope_theta", *(("factor", *factors) if is_llama3 else ())):
        value = settings[name]
        if type(value) not in (int, float) or not value > 0:
            raise ConfigError(f"{name} is {short_repr(value)}, expected a number > 0.", field=name)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_key_value_heads is {config.num_key_value_heads}, but it must divide "
            f"num_attention_heads, which is {config.num_attention_heads}. Change one of them.",
            field="num_key_value_heads",
        )
    if is_llama3 and not settings["low_freq_factor"] < settings["high_freq_factor"]:
        low, high = (settings[name] for name in factors)
        raise ConfigError(
            "rotation of the type llama3 needs low_freq_factor < high_freq_factor, got "
            f"{low} and {high}. Correct these values.",
            field="low_freq_factor",
        )


def head_dim(config: PreTrainedConfig) -> int:
    """Return the width of one head of attention (D)."""
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def _unsupported(name: str, value: object, allowed: tuple[object, ...]) -> str:
    names = " or ".join(str(one) for one in allowed)
    return (
        f"the draft head has {name} {short_repr(value)}, but only {names} is supported. {_ADVICE}"
    )


_ROTATION = frozenset({
    "factor", "high_freq_factor", "low_freq_factor", "mrope_interleaved", "mrope_section",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "type",
})  # fmt: skip
"""Settings of rotation; sections of three equal positions, as text has them, change nothing."""
_OF_TRANSFORMERS = frozenset(vars(GenerationConfig()) | vars(PreTrainedConfig()))  # type: ignore[no-untyped-call]
"""Settings of generation, and those that any configuration of transformers has."""
_OF_TRAINING = frozenset({
    "attention_dropout", "attn_pdrop", "auf", "embd_pdrop", "embed_requires_grad",
    "enable_sp_ulysses", "gradient_checkpointing", "hidden_dropout", "initializer_range",
    "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_factor", "pretraining_tp",
    "resid_pdrop", "ttt_length", "ttt_steps", "use_bfloat16",
})  # fmt: skip
_OF_FILES = frozenset({
    "add_cross_attention", "auto_map", "cross_attention_hidden_size", "eagle_decoder_type",
    "finetuning_task", "has_lm_head", "has_no_defaults_at_init", "is_decoder", "name_or_path",
    "num_nextn_predict_layers", "prefix", "pruned_heads", "sep_token_id", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "target_model_type",
    "target_vocab_size", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "torch_dtype", "torchscript", "verifier",
    # The tensors of the folder decide about biases. The others are of windows that are not used.
    "bias", "fusion_bias", "max_window_layers", "next_layer_regular", "sliding_window_non_causal",
})  # fmt: skip
_WITHOUT_EFFECT = _OF_TRANSFORMERS | _OF_TRAINING | _OF_FILES
_OFF: tuple[object, ...] = (False, 0, [], {}, "")
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "embedding_multiplier": (1,), "is_causal": (True,), "is_neox_style": (True,),
    "logit_scale": (1,),
    "parallel_draft_step": (0, 1), "position_embedding_type": ("rope",),
    "projector_type": ("dflash",), "residual_multiplier": (1,),
}  # fmt: skip
"""Values with which a head computes what graphkit computes."""
FULL, WINDOWED = "full_attention", "sliding_attention"
"""Types of layers that graphkit runs."""


def check_settings(
    data: Mapping[str, object],
    used: Collection[str],
    allowed: Mapping[str, tuple[object, ...]],
    where: str = "config.json",
) -> None:
    """Refuse the first setting of a head that is neither used nor without effect.

    Args:
        data: The settings.
        used: Names that the caller reads.
        allowed: Values of further names with which the head computes what graphkit computes.
        where: The object that has the settings, for the error.

    Raises:
        CheckpointError: There is such a setting.
    """
    values = {**_ALLOWED, **allowed}
    known = {*used, *LAYER_SETTINGS, *_WITHOUT_EFFECT} - allowed.keys()
    for name, value in data.items():
        if value is None or name in known or name.startswith("_"):
            continue
        if value not in values.get(name, _OFF):
            computed = " or ".join(repr(one) for one in values.get(name, ()))
            raise CheckpointError(
                f"{where} sets {name}, which is not supported with the value {short_repr(value)}"
                f"{f', only with {computed}' if computed else ''}. Use a draft head without it, or "
                f"remove {name} if the head was trained without it."
            )
    for name in ("rope_scaling", "rope_parameters"):
        rope = data.get(name)
        others = sorted(rope.keys() - _ROTATION) if isinstance(rope, Mapping) else []
        if others:
            raise CheckpointError(
                f"{where} sets {name}.{others[0]}, which is not supported. Use a draft head with "
                "rotation of the type default or llama3."
            )


def check_layer_types(kinds: object) -> None:
    """Refuse types of layers that graphkit does not run.

    Raises:
        CheckpointError: There is another type, or it is no list.
    """
    if not isinstance(kinds, list) or any(kind not in (FULL, WINDOWED) for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types is {short_repr(kinds)}, but graphkit runs only a list of "
            f"{FULL} and {WINDOWED}. Use a head with one of them."
        )


def head_config(data: Mapping[str, object]) -> PreTrainedConfig:
    """Return the configuration of the layers of an EAGLE or EAGLE-3 head.

    A window of ``layer_types`` is that of Mistral, whatever the type of the layer.

    Raises:
        CheckpointError: A value is missing, malformed or unsupported.
    """
    kinds, window = data.get("layer_types"), data.get("sliding_window")
    own: Any = [] if kinds is None else kinds
    own = own[: layer_count(data)] if isinstance(own, list) else own
    check_layer_types(own)
    if WINDOWED in own:
        if type(window) is not int or window < 1:
            raise CheckpointError(
                f"config.json: layer_types has {WINDOWED}, so that sliding_window must be an int "
                f">= 1, got {short_repr(window)}. Correct config.json."
            )
        if data.get("model_type") not in ("llama", "mistral") or data.get("attention_bias"):
            raise CheckpointError(
                f"config.json of the draft head has {WINDOWED} in a layer of "
                f"{data.get('model_type')} with biases or norms of heads, which graphkit does not "
                "compute. Use a head whose layer attends to all tokens."
            )
        data = {**data, "model_type": "mistral"}
    elif own and data.get("model_type") == "mistral":
        data = {**data, "sliding_window": None}
    return layer_config(data)


_EXPECTED: Mapping[type, str] = {
    dict: "an object", list: "a list of ints", bool: "true or false", int: "an int",
    float: "a number",
}  # fmt: skip


def setting(data: Mapping[str, object], name: str, kind: type, default: Any = None) -> Any:
    """Return a setting of ``config.json`` of a type; a float may be an int, too.

    Args:
        data: The settings.
        name: Its name.
        kind: ``dict``, ``list`` (of ints), ``bool``, ``int`` or ``float``.
        default: Its value if it is absent or null; ``None`` if it has to be there.

    Raises:
        CheckpointError: The setting is absent, or has another type.
    """
    value = data.get(name)
    if value is None and default is not None:
        return default
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if isinstance(value, list):
        is_kind = is_kind and all(type(each) is int for each in value)
    if not is_kind:
        raise CheckpointError(
            f"config.json: {name} must be {_EXPECTED[kind]}, got {short_repr(value)}. Correct "
            "config.json."
        )
    return value


def layer_count(data: Mapping[str, object]) -> int:
    """Return ``num_hidden_layers``, or 1."""
    layers = data.get("num_hidden_layers")
    return layers if type(layers) is int else 1
