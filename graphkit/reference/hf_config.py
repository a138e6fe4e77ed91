"""Checked access to the values of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from graphkit.config import require_int
from graphkit.errors import CheckpointError, ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Supported values of options that the reference models do not implement; absent keys are fine.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
_REMEDY = (
    "Use a dense llama, mistral, qwen2 or qwen3 checkpoint, or write a CaptureTarget for this "
    "model."
)


def check_supported(data: Mapping[str, object]) -> str:
    """Check that the reference models implement this configuration; return its ``model_type``.

    Raises:
        CheckpointError: The type or an option is unsupported.
    """
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        _unsupported("model_type", model_type, tuple(ARCHITECTURES))
    for key, allowed in _SUPPORTED.items():
        if key in data and data[key] not in allowed:
            _unsupported(key, data[key], allowed)
    return model_type


def rope_parameters(data: Mapping[str, object]) -> dict[str, object]:
    """Return the rotary settings of transformers 4 or 5 under the names of version 5.

    Raises:
        CheckpointError: The rotary type is neither ``default`` nor ``llama3``.
    """
    rope: dict[str, object] = {"rope_theta": data.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        given = data.get(key) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(
                f"config.json: {key} must be an object, got {given!r}. Correct config.json."
            )
        rope |= given
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "llama3"):
        _unsupported("rope_type", rope["rope_type"], ("default", "llama3"))
    if rope.get("partial_rotary_factor") not in (1.0, None):
        _unsupported("partial_rotary_factor", rope["partial_rotary_factor"], (1.0, None))
    return rope


def sliding_window(data: Mapping[str, object], model_type: str, max_positions: int) -> int | None:
    """Return the most tokens that a token of a Mistral model attends to, itself included.

    It is 4096 if the key is absent. ``None`` in the file means all tokens, and so does a window of
    the longest context.

    Raises:
        CheckpointError: The window is not an int of at least 1.
    """
    if model_type != "mistral" or data.get("sliding_window", 4096) is None:
        return None
    window = integer(data, "sliding_window", 4096)
    return window if window < max_positions else None


def integer(data: Mapping[str, object], key: str, default: int | None = None) -> int:
    """Return an int of at least 1; ``None`` in the file counts as absent.

    Raises:
        CheckpointError: The key is missing without a default, or is not such an int.
    """
    value = default if data.get(key) is None else data[key]
    if value is None:
        raise CheckpointError(f"config.json has no {key}. Add it, an int >= 1.")
    try:
        require_int("config.json", key, value)
    except ConfigError as error:
        raise CheckpointError(f"{error} Correct config.json.") from error
    assert isinstance(value, int), "require_int accepts ints only"
    return value


def number(data: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a number above 0; ``None`` in the file counts as absent.

    Raises:
        CheckpointError: The key is missing without a default, or is not such a number.
    """
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(
            f"config.json: {key} must be a number > 0, got {value!r}. Correct config.json."
        )
    return float(value)


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


def _unsupported(key: str, value: object, allowed: tuple[object, ...]) -> NoReturn:
    names = " or ".join(str(one) for one in allowed if one is not None) or "none"
    raise CheckpointError(
        f"config.json has {key} {value!r}, but only {names} is supported. {_REMEDY}"
    )
