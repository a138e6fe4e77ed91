"""The settings of ``generation_config.json``: parameters of requests, and those not computed."""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from graphkit.config import is_int
from graphkit.engine import SamplingParams
from graphkit.engine.step.sampling_params import MAX_BIASED_IDS
from graphkit.errors import CheckpointError, short_repr
from graphkit.models.refusals import one_line

logger = logging.getLogger(__name__)
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_WITHOUT_EFFECT = frozenset({
    # What a caller passes for each request, and what commands and engines set themselves.
    "do_sample", "max_length", "max_new_tokens", "num_return_sequences", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "chat_format",
    "max_window_size", "trust_remote_code",
    # Outputs, and tokens that no text of a decoder depends on.
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "user_token_id", "assistant_token_id", "transformers_version", "eos_token_id",
    # Speculation of transformers, which changes no text.
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type",
    "assistant_ensemble_weight",
    # Settings of beams, which change nothing for one beam.
    "length_penalty", "early_stopping",
})  # fmt: skip
_NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "num_beams": 1, "num_beam_groups": 1,
    "typical_p": 1, "guidance_scale": 1, "top_h": 1,
}  # fmt: skip
"""Values without effect other than those that are 0, false or empty."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the settings of generation say about a request.

    Attributes:
        parameters: Arguments of ``SamplingParams``.
        computed: Settings among these that change greedy text.
        others: Settings that change text and that graphkit does not compute.
    """

    parameters: Mapping[str, Any]
    computed: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters of a request; ``changes`` replace them.

        Raises:
            ConfigError: A value is out of range.
        """
        chosen = {**self.parameters, **changes}
        if "min_tokens" in chosen and "min_tokens" not in changes:  # a setting for longer texts
            longest = chosen.get("max_new_tokens", SamplingParams().max_new_tokens)
            if is_int(longest):
                chosen["min_tokens"] = min(chosen["min_tokens"], longest)
        return SamplingParams(**chosen)

    def report(self, name: str) -> None:
        """Log one warning that names the settings that requests do not have by themselves."""
        texts = []
        if self.others:
            texts.append(
                f"graphkit does not compute {', '.join(self.others)}, so that its text differs "
                "from that of transformers"
            )
        if self.computed:
            texts.append(
                f"requests have {', '.join(self.computed)} only with sampling_params() of the "
                "model, which graphkit generate uses"
            )
        if texts:
            logger.warning("The generation settings of %s change text: %s.", name, "; ".join(texts))


def generation_defaults(
    config: GenerationConfig | None, stop_ids: frozenset[int], vocab_size: int
) -> GenerationDefaults:
    """Return what a configuration says about requests.

    Args:
        config: That of a model; ``None`` for none.
        stop_ids: Tokens that end a text.
        vocab_size: Size of the model's vocabulary; larger tokens are left out.

    Raises:
        CheckpointError: A setting is malformed.
    """
    settings = {} if config is None else vars(config)
    if settings.get("do_sample") and settings.get("temperature") is None:
        settings = {**settings, "temperature": 1.0}  # as transformers samples
    stop_ids = frozenset(token for token in stop_ids if token < vocab_size)
    parameters: dict[str, Any] = {"stop_token_ids": stop_ids}
    computed, others = [], []
    for name, value in settings.items():
        if not value or name.startswith("_") or name in _WITHOUT_EFFECT:
            continue
        if name in _FILTERS:
            if name != "temperature" or settings.get("do_sample"):
                parameters[name] = value
            continue
        if value == _NEUTRAL.get(name):
            continue
        try:
            arguments, is_whole = _arguments(name, value, stop_ids, vocab_size)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{GENERATION_CONFIG_NAME}: {name} is malformed: {short_repr(value)}. Correct it."
            ) from error
        before, added = (each.get("logit_bias", {}) for each in (parameters, arguments))
        biases = before | {token: bias + before.get(token, 0) for token, bias in added.items()}
        if len(biases) <= MAX_BIASED_IDS:
            parameters |= {**arguments, **({"logit_bias": biases} if biases else {})}
            computed += [name] if arguments else []
        else:
            is_whole = False
        others += [] if is_whole else [name]
    return GenerationDefaults(parameters, tuple(computed), tuple(others))


def _arguments(
    name: str, value: Any, stop_ids: frozenset[int], vocab_size: int
) -> tuple[dict[str, Any], bool]:
    """Return the arguments of ``SamplingParams`` for a setting, and whether they are all of it."""
    if name == "repetition_penalty":
        return {name: float(value)}, True
    if name == "min_new_tokens":
        return {"min_tokens": operator.index(value)}, True
    if name == "suppress_tokens":
        biases = [([token], -math.inf) for token in value]
    elif name == "bad_words_ids":  # transformers keeps the stop tokens
        words = [word for word in value if len(word) != 1 or word[0] not in stop_ids]
        biases = [(word, -math.inf) for word in words]
    elif name == "sequence_bias":
        pairs = value.items() if isinstance(value, Mapping) else value
        biases = [(list(ids), float(bias)) for ids, bias in pairs]
    else:
        return {}, False
    single = {ids[0]: bias for ids, bias in biases if len(ids) == 1 and 0 <= ids[0] < vocab_size}
    is_whole = all(len(ids) == 1 for ids, _ in biases)
    return ({"logit_bias": single} if single else {}), is_whole


def folder_defaults(
    folder: str | Path, vocab_size: int, *, trust_remote_code: bool = False
) -> GenerationDefaults:
    """Return what the files of a folder say about requests.

    The stop tokens are ``eos_token_id`` of ``generation_config.json``, of which null is none, else
    of ``config.json``.

    Raises:
        CheckpointError: A file is damaged, or a setting is malformed.
    """
    own = Path(folder) / GENERATION_CONFIG_NAME
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        settings = GenerationConfig.from_model_config(config)
        ids = settings.eos_token_id
        if own.exists():
            settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
            if "eos_token_id" in json.loads(own.read_bytes()):
                ids = settings.eos_token_id
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise CheckpointError(f"{folder} has damaged settings: {one_line(error)}.") from error
    return generation_defaults(settings, stop_ids(ids, folder), vocab_size)


def stop_ids(ids: Any, owner: object) -> frozenset[int]:
    """Return the stop tokens of a setting: a token, a list of them, or ``None``.

    Raises:
        CheckpointError: The setting has another type, or an id is negative.
    """
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(is_int(token) and token >= 0 for token in listed):
        raise CheckpointError(
            f"{owner}: eos_token_id must be a token id or a list of them, got {short_repr(ids)}. "
            f"Correct {GENERATION_CONFIG_NAME} or config.json."
        )
    return frozenset(listed)
