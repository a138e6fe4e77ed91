"""Configurations of the decoder layers of draft heads, read from and written to ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from graphkit.config import require_int, require_type
from graphkit.errors import CheckpointError, ConfigError, short_repr

TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of transformers whose layers published heads have."""
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
    names = LAYER_SETTINGS - _without_use(kind)
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
    for name in ("rms_norm_eps", "rope_theta"):
        if not settings[name] > 0:
            raise ConfigError(f"{name} is {settings[name]}, expected a number > 0.", field=name)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_key_value_heads is {config.num_key_value_heads}, but it must divide "
            f"num_attention_heads, which is {config.num_attention_heads}. Change one of them.",
            field="num_key_value_heads",
        )
    if rope.get("rope_type") == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if rope["factor"] <= 0 or not 0 < low < high:
            raise ConfigError(
                "rotation of the type llama3 needs factor > 0 and 0 < low_freq_factor < "
                f"high_freq_factor, got factor {rope['factor']}, low_freq_factor {low} and "
                f"high_freq_factor {high}. Correct these values.",
                field="factor",
            )


def head_dim(config: PreTrainedConfig) -> int:
    """Return the width of one head of attention (D)."""
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def config_entries(config: PreTrainedConfig) -> dict[str, object]:
    """Return the entries of ``config.json``, from which ``layer_config`` returns the configuration.

    Those of rotation have the keys of transformers 4, which version 5 reads too.
    """
    names = LAYER_SETTINGS - _without_use(config.model_type)
    data = {name: value for name, value in config.to_dict().items() if name in names}
    rope = dict(data.pop("rope_parameters"))
    data["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        data["rope_scaling"] = rope
    # The defaults of transformers, 1 and 2, are ordinary tokens of the byte vocabulary.
    return data | {"bos_token_id": None, "eos_token_id": None}


def _without_use(kind: str) -> set[str]:
    """Return the settings that layers of a type do not use: heads have one type of layers.

    ``plain_tensors`` reads those of quantised weights.
    """
    unused = {"layer_types", "quantization_config"}
    return unused if kind == "mistral" else {*unused, "sliding_window"}


def _unsupported(name: str, value: object, allowed: tuple[object, ...]) -> str:
    names = " or ".join(str(one) for one in allowed) or "none"
    return (
        f"the draft head has {name} {short_repr(value)}, but only {names} is supported. {_ADVICE}"
    )
