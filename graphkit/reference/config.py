"""Configuration of a Llama-layout model, read from and written to ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from graphkit.config import require_int
from graphkit.errors import CheckpointError, ConfigError
from graphkit.reference import hf_config as hf

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
                f"RopeScaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor, got "
                f"factor {self.factor}, low_freq_factor {self.low_freq_factor} and "
                f"high_freq_factor {self.high_freq_factor}. Correct these values.",
                field="factor",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a dense decoder.

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
            require_int("LlamaConfig", field, getattr(self, field))
        if self.sliding_window is not None:
            require_int("LlamaConfig", "sliding_window", self.sliding_window)
            if self.attention_bias or self.output_bias or self.qk_norm:
                raise ConfigError(
                    "LlamaConfig has a sliding_window with biases or qk_norm, which no supported "
                    "model type has. Set sliding_window to None, or the others to False.",
                    field="sliding_window",
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"LlamaConfig.num_key_value_heads is {self.num_key_value_heads}, but it must "
                f"divide num_attention_heads, which is {self.num_attention_heads}. Change one of "
                "them.",
                field="num_key_value_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"LlamaConfig.head_dim is {self.head_dim}, but rotary embedding needs an even "
                "number. Set an even head_dim.",
                field="head_dim",
            )
        if self.attention_bias != self.output_bias and (self.output_bias or self.qk_norm):
            raise ConfigError(
                f"LlamaConfig has attention_bias {self.attention_bias}, output_bias "
                f"{self.output_bias} and qk_norm {self.qk_norm}, which no supported model type "
                "has. Set output_bias equal to attention_bias. Only a Qwen2 model, which has no "
                "qk_norm, has attention_bias alone.",
                field="output_bias",
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> LlamaConfig:
        """Create a configuration from a ``config.json`` of transformers 4 or 5.

        Raises:
            CheckpointError: A key is missing, malformed or unsupported.
        """
        model_type = hf.check_supported(data)
        heads = hf.integer(data, "num_attention_heads")
        hidden_size = hf.integer(data, "hidden_size")
        # Qwen3 alone has a fixed default, see transformers' Qwen3Config.
        head_dim = 128 if model_type == "qwen3" else max(1, hidden_size // heads)
        output_bias = model_type in ("llama", "qwen3") and hf.flag(data, "attention_bias")
        rope = hf.rope_parameters(data)
        max_positions = hf.integer(data, "max_position_embeddings", 2048)
        try:
            return cls(
                vocab_size=hf.integer(data, "vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=hf.integer(data, "intermediate_size"),
                num_hidden_layers=hf.integer(data, "num_hidden_layers"),
                num_attention_heads=heads,
                num_key_value_heads=hf.integer(data, "num_key_value_heads", heads),
                head_dim=hf.integer(data, "head_dim", head_dim),
                max_position_embeddings=max_positions,
                rms_norm_eps=hf.number(data, "rms_norm_eps", 1e-6),
                rope_theta=hf.number(rope, "rope_theta", 10000.0),
                rope_scaling=_rope_scaling(rope, max_positions),
                tie_word_embeddings=hf.flag(data, "tie_word_embeddings"),
                attention_bias=output_bias or model_type == "qwen2",
                output_bias=output_bias,
                qk_norm=model_type == "qwen3",
                sliding_window=hf.sliding_window(data, model_type, max_positions),
            )
        except ConfigError as error:
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
        data |= {"model_type": kind, "architectures": [hf.ARCHITECTURES[kind]]}
        # The defaults of transformers, 1 and 2, are ordinary tokens of the byte vocabulary.
        data |= {"hidden_act": "silu", "bos_token_id": None, "eos_token_id": None}
        if kind == "mistral":
            data["sliding_window"] = self.sliding_window
        elif kind != "qwen2":
            data["attention_bias"] = self.attention_bias
        if self.rope_scaling is not None:
            data["rope_scaling"] = {"rope_type": "llama3"} | asdict(self.rope_scaling)
        return data


def _rope_scaling(rope: Mapping[str, object], max_positions: int) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    return RopeScaling(
        factor=hf.number(rope, "factor"),
        low_freq_factor=hf.number(rope, "low_freq_factor"),
        high_freq_factor=hf.number(rope, "high_freq_factor"),
        original_max_position_embeddings=hf.integer(rope, _ORIGINAL, max_positions),
    )
