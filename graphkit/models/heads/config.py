"""Settings of the decoder layers of draft heads, read from and written to ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graphkit.config import require_int, require_type
from graphkit.errors import CheckpointError, ConfigError, short_repr

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_ORIGINAL = "original_max_position_embeddings"
_SAME_NAME = (*_SIZES, "rms_norm_eps", "rope_theta", "tie_word_embeddings")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "rope_type": ("default", "llama3"),
    "use_sliding_window": (False,),
}
"""Values of options that the layers do not implement otherwise; ``None`` is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies of type ``llama3`` (Llama 3.1 and later).

    Attributes:
        factor: Divisor of low frequencies.
        low_freq_factor: Frequencies with fewer turns than this over the original context are low.
        high_freq_factor: Frequencies with more turns than this are kept.
        original_max_position_embeddings: Context length of pretraining, in tokens.

    Raises:
        ConfigError: A factor is not positive, or the low factor is not below the high one.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        require_int("RopeScaling", _ORIGINAL, getattr(self, _ORIGINAL))
        if self.factor <= 0 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "RopeScaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor, got "
                f"factor {self.factor}, low_freq_factor {self.low_freq_factor} and "
                f"high_freq_factor {self.high_freq_factor}. Correct these values.",
                field="factor",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Sizes and options of the dense decoder layers of a draft head.

    Attributes:
        vocab_size: Size of the vocabulary (V).
        hidden_size: Width of the residual stream (H).
        intermediate_size: Width of the SwiGLU's hidden layer.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads (N).
        num_key_value_heads: Key and value heads (M); divides N.
        head_dim: Width of one head (D), even; N x D need not be H.
        max_position_embeddings: Longest context that the model supports, in tokens.
        rms_norm_eps: Added to the mean square before the square root.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Scaling of those frequencies, or ``None``.
        tie_word_embeddings: Whether the output head shares the embedding's weight.
        attention_bias: Whether the q, k and v projections have a bias.
        output_bias: Whether the o projection has a bias (Llama with ``attention_bias``; not Qwen2).
        qk_norm: Whether each query and key head is normalised before rotation (Qwen3).
        sliding_window: Most tokens that a token attends to, itself included, in all layers
            (Mistral); ``None`` for all tokens.

    Raises:
        ConfigError: A value is out of range, or two values contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for field in _SIZES:
            require_int("LayerConfig", field, getattr(self, field))
        if self.sliding_window is not None:
            require_int("LayerConfig", "sliding_window", self.sliding_window)
            if self.attention_bias or self.output_bias or self.qk_norm:
                raise ConfigError(
                    "LayerConfig has a sliding_window with biases or qk_norm, which no supported "
                    "model type has. Set sliding_window to None, or the others to False.",
                    field="sliding_window",
                )
        for field in ("rms_norm_eps", "rope_theta"):
            expected = "a number > 0"
            require_type("LayerConfig", field, getattr(self, field), (int, float), expected)
            if not getattr(self, field) > 0:
                raise ConfigError(f"LayerConfig.{field} must be {expected}.", field=field)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"LayerConfig.num_key_value_heads is {self.num_key_value_heads}, but it must "
                f"divide num_attention_heads, which is {self.num_attention_heads}. Change one of "
                "them.",
                field="num_key_value_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"LayerConfig.head_dim is {self.head_dim}, but rotary embedding needs an even "
                "number. Set an even head_dim.",
                field="head_dim",
            )
        if self.attention_bias != self.output_bias and (self.output_bias or self.qk_norm):
            raise ConfigError(
                f"LayerConfig has attention_bias {self.attention_bias}, output_bias "
                f"{self.output_bias} and qk_norm {self.qk_norm}, which no supported model type "
                "has. Set output_bias equal to attention_bias. Only a Qwen2 model, which has no "
                "qk_norm, has attention_bias alone.",
                field="output_bias",
            )

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, object],
        *,
        advice: str = "Use a head whose layers are those of llama, mistral, qwen2 or qwen3.",
    ) -> LayerConfig:
        """Create a configuration from a ``config.json``.

        That of ``to_dict`` names all values. transformers supplies what others leave out.

        Args:
            data: The settings.
            advice: What to do about an unsupported one, for the error.

        Raises:
            CheckpointError: A value is missing, malformed or unsupported.
        """
        kind = data.get("model_type")
        if not isinstance(kind, str) or kind not in _ARCHITECTURES:
            raise _unsupported("model_type", kind, tuple(_ARCHITECTURES), advice)
        names = {*_SIZES, "rms_norm_eps", "tie_word_embeddings"}
        names -= set() if kind == "qwen3" else {"head_dim"}  # of others, the hidden size has it
        is_whole = all(data.get(name) is not None for name in names)
        is_whole &= kind != "mistral" or "sliding_window" in data
        values = data if is_whole else _with_defaults(data)
        rope = _rope(values)
        for key, allowed in _SUPPORTED.items():
            value = rope.get(key, data.get(key, values.get(key)))
            if value is not None and value not in allowed:
                raise _unsupported(key, value, allowed, advice)
        try:
            return cls(**_settings(kind, values, rope))
        except (ConfigError, TypeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"config.json is inconsistent: {error} Correct config.json."
            ) from error

    @property
    def model_type(self) -> str:
        """The Hugging Face ``model_type``; Mistral without a window is ``llama``."""
        if self.sliding_window is not None:
            return "mistral"
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.attention_bias and not self.output_bias else "llama"

    def to_dict(self) -> dict[str, object]:
        """Return the configuration as a Hugging Face ``config.json``, the inverse of ``from_dict``.

        Rotary settings use the keys of transformers 4, which version 5 reads too.
        """
        data: dict[str, object] = {name: getattr(self, name) for name in _SAME_NAME}
        kind = self.model_type
        data |= {"model_type": kind, "architectures": [_ARCHITECTURES[kind]]}
        # The defaults of transformers, 1 and 2, are ordinary tokens of the byte vocabulary.
        data |= {"hidden_act": "silu", "bos_token_id": None, "eos_token_id": None}
        if kind == "mistral":
            data["sliding_window"] = self.sliding_window
        elif kind != "qwen2":
            data["attention_bias"] = self.attention_bias
        if self.rope_scaling is not None:
            data["rope_scaling"] = {"rope_type": "llama3"} | asdict(self.rope_scaling)
        return data


def _settings(kind: str, values: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LayerConfig`` for a complete ``config.json``."""
    output_bias = kind in ("llama", "qwen3") and bool(values.get("attention_bias"))
    longest = values["max_position_embeddings"]
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    window = values.get("sliding_window") if kind == "mistral" else None
    factors = "factor", "low_freq_factor", "high_freq_factor"
    scaling: dict[str, Any] = {name: rope.get(name) for name in factors}
    return {
        **{name: values.get(name) for name in _SAME_NAME},
        "head_dim": head_dim,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None
        if rope["rope_type"] == "default"
        else RopeScaling(**scaling, original_max_position_embeddings=rope.get(_ORIGINAL, longest)),
        "attention_bias": output_bias or kind == "qwen2",
        "output_bias": output_bias,
        "qk_norm": kind == "qwen3",
        # A window of the longest context is none.
        "sliding_window": None if isinstance(window, int) and window >= longest else window,
    }


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of transformers 4 or 5 under the names of version 5."""
    rope = {"rope_theta": values.get("rope_theta", 10000.0)}
    for key in ("rope_scaling", "rope_parameters"):
        found = values.get(key) or {}
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"config.json: {key} must be an object, got {short_repr(found)}. Correct "
                "config.json."
            )
        rope |= found
    return {"rope_type": rope.get("type", "default")} | rope


def _with_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``config.json`` with the values that its type has by default in transformers."""
    try:
        from transformers import AutoConfig

        return {**AutoConfig.for_model(**data).to_dict()}
    except Exception as error:  # transformers raises errors of many classes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"config.json cannot be read by transformers: {reason}") from error


def _unsupported(
    key: str, value: object, allowed: tuple[object, ...], advice: str
) -> CheckpointError:
    names = " or ".join(str(one) for one in allowed) or "none"
    return CheckpointError(
        f"config.json has {key} {short_repr(value)}, but only {names} is supported. {advice}"
    )
