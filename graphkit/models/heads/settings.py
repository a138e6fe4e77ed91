"""The settings of a draft head's ``config.json``: each is used, has no effect, or is refused.

A setting that is dropped costs accepted drafts without a word, because the text stays right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from transformers import PreTrainedConfig

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.heads.config import LAYER_SETTINGS, layer_config

_ROTATION = frozenset({
    "factor", "high_freq_factor", "low_freq_factor", "mrope_interleaved", "mrope_section",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "type",
})  # fmt: skip
"""Settings of rotation; sections of three equal positions, as text has them, change nothing."""
_OF_GENERATION = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
    "typical_p",
})  # fmt: skip
_OF_TRAINING = frozenset({
    "attention_dropout", "attn_pdrop", "auf", "embd_pdrop", "embed_requires_grad",
    "enable_sp_ulysses", "gradient_checkpointing", "hidden_dropout", "initializer_range",
    "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_factor", "pretraining_tp",
    "resid_pdrop", "ttt_length", "ttt_steps", "use_bfloat16",
})  # fmt: skip
_OF_FILES = frozenset({
    "add_cross_attention", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "dtype", "eagle_decoder_type", "eos_token_id",
    "finetuning_task", "has_lm_head", "has_no_defaults_at_init", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "name_or_path", "num_nextn_predict_layers", "pad_token_id",
    "prefix", "problem_type", "pruned_heads", "sep_token_id", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "target_model_type",
    "target_vocab_size",
    "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers_version", "use_cache", "verifier",
    # The tensors of the folder decide about biases. The others are of windows that are not used.
    "bias", "fusion_bias", "max_window_layers", "next_layer_regular", "sliding_window_non_causal",
})  # fmt: skip
_WITHOUT_EFFECT = _OF_GENERATION | _OF_TRAINING | _OF_FILES
_OFF: tuple[object, ...] = (False, 0, [], {}, "")
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "embedding_multiplier": (1,), "is_causal": (True,), "is_neox_style": (True,),
    "logit_scale": (1,),
    "parallel_draft_step": (0, 1), "position_embedding_type": ("rope",),
    "projector_type": ("dflash",), "residual_multiplier": (1,),
}  # fmt: skip
"""Values with which a head computes what graphkit computes."""
_WINDOWED, _FULL = "sliding_attention", "full_attention"


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
    values, known = (
        {**_ALLOWED, **allowed},
        {*used, *LAYER_SETTINGS, *_WITHOUT_EFFECT} - allowed.keys(),
    )
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


def head_config(data: Mapping[str, object]) -> PreTrainedConfig:
    """Return the configuration of the layers of an EAGLE or EAGLE-3 head.

    A window of ``layer_types`` is that of Mistral, whatever the type of the layer.

    Raises:
        CheckpointError: A value is missing, malformed or unsupported.
    """
    kinds, window = data.get("layer_types"), data.get("sliding_window")
    if kinds is not None and not isinstance(kinds, list):
        raise CheckpointError(
            f"config.json: layer_types must be a list, got {short_repr(kinds)}. Correct "
            "config.json."
        )
    own = kinds[: _count(data)] if kinds else []
    if any(kind not in (_FULL, _WINDOWED) for kind in own):
        raise CheckpointError(
            f"config.json of the draft head has layer_types {short_repr(own)}, but graphkit runs "
            "only "
            f"{_FULL} and {_WINDOWED}. Use a head with one of them."
        )
    if _WINDOWED in own:
        if type(window) is not int or window < 1:
            raise CheckpointError(
                f"config.json: layer_types has {_WINDOWED}, so that sliding_window must be an int "
                f">= 1, got {short_repr(window)}. Correct config.json."
            )
        if data.get("model_type") not in ("llama", "mistral") or data.get("attention_bias"):
            raise CheckpointError(
                f"config.json of the draft head has {_WINDOWED} in a layer of "
                f"{data.get('model_type')} with biases or norms of heads, which graphkit does not "
                "compute. Use a head whose layer attends to all tokens."
            )
        data = {**data, "model_type": "mistral"}
    elif own and data.get("model_type") == "mistral":
        data = {**data, "sliding_window": None}
    return layer_config(data)


def as_object(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a nested object; empty if it is absent.

    Raises:
        CheckpointError: The value is not an object.
    """
    value = data.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"config.json: {name} must be an object, got {short_repr(value)}. Correct config.json."
        )
    return value


def _count(data: Mapping[str, object]) -> int:
    layers = data.get("num_hidden_layers")
    return layers if type(layers) is int else 1
