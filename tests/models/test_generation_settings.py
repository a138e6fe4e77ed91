"""Settings of generation_config.json are parameters of requests, or named in one warning."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

import graphkit as gk
from checkpoint_folders import byte_level_tokenizer, write_checkpoint
from graphkit import models
from graphkit.errors import CheckpointError
from small_models import small_model

PROMPT = [5, 17, 3, 17, 3, 17, 9, 5, 17]
COMPUTED = {
    "repetition_penalty": 1.3,
    "suppress_tokens": [3, 17, 40],
    "min_new_tokens": 9,
    "bad_words_ids": [[5], [9]],
    "sequence_bias": [[[7], 4.0]],
}
OTHERS = {
    "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3, "begin_suppress_tokens": [4],
    "forced_bos_token_id": 3, "forced_eos_token_id": 2, "encoder_repetition_penalty": 1.2,
    "typical_p": 0.5, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "top_h": 0.4, "num_beams": 4,
    "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5, "min_length": 30,
    "exponential_decay_length_penalty": [5, 1.1], "renormalize_logits": True,
    "remove_invalid_values": True, "stop_strings": ["end"], "token_healing": True,
    "watermarking_config": {"bias": 2.5}, "max_time": 3.0, "forced_decoder_ids": [[1, 5]],
    "bad_words_ids": [[5, 9], [4]], "sequence_bias": [[[7, 8], 4.0]], "a_later_setting": 3,
    "suppress_tokens": [*range(40, 1065)],
}  # fmt: skip
WITHOUT_EFFECT = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
    "max_length": 4096, "max_new_tokens": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": [2, 7], "transformers_version": "4.51.0", "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "length_penalty": 1.0,
    "early_stopping": False, "suppress_tokens": [], "use_cache": True, "min_length": 0,
    "cache_implementation": "hybrid", "num_return_sequences": 1, "chat_format": "chatml",
    "guidance_scale": 1.0, "remove_invalid_values": False, "forced_eos_token_id": None,
    "prompt_lookup_num_tokens": 3, "max_window_size": 6144,
}  # fmt: skip


@pytest.fixture
def load(tmp_path, caplog):
    """``load(settings)``: a model whose folder has these settings, and what the load warned of."""
    model = small_model("llama", vocab_size=1100)
    model.save_pretrained(tmp_path)

    def make(settings):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "graphkit"):
            loaded = models.load(tmp_path, device="cpu", check=False, fuse=False)
        records = [r for r in caplog.records if r.name.startswith("graphkit")]
        return loaded, [record.getMessage() for record in records]

    return make


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_is_not_computed_is_named_in_one_warning(name, load):
    _, warnings = load({"eos_token_id": 2, name: OTHERS[name]})
    (warning,) = warnings
    assert "graphkit does not compute" in warning
    assert name in warning.partition("; ")[0]


def test_all_of_them_are_one_warning(load):
    _, (warning,) = load(OTHERS)
    assert all(name in warning for name in OTHERS)


def test_settings_without_effect_on_greedy_text_are_no_warning(load):
    loaded, warnings = load(WITHOUT_EFFECT)
    assert warnings == []
    sampling = loaded.sampling_params(seed=3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.6, 20, 0.95, 0.1,
    )  # fmt: skip
    assert sampling.stop_token_ids == {2, 7}
    assert loaded.sampling_params(temperature=0, top_k=3).top_k == 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"do_sample": True}, 1), ({"do_sample": True, "temperature": 0.0}, 0),
     ({"do_sample": False, "temperature": 0.6}, 0), ({"temperature": 0.6}, 0)],
)  # fmt: skip
def test_a_model_that_samples_has_a_temperature(settings, expected, load):
    loaded, _ = load(settings | {"top_k": 64})
    assert loaded.sampling_params().temperature == expected


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_setting_is_a_parameter_and_is_named(name, load):
    loaded, (warning,) = load({"eos_token_id": 2, name: COMPUTED[name]})
    assert name in warning
    assert "does not compute" not in warning
    sampling = loaded.sampling_params(max_new_tokens=12)
    assert sampling != gk.SamplingParams(max_new_tokens=12, stop_token_ids=[2])
    assert loaded.sampling_params(max_new_tokens=4).max_new_tokens == 4


@pytest.mark.slow
@pytest.mark.parametrize("names", [[name] for name in COMPUTED] + [list(COMPUTED)], ids="-".join)
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_the_text_is_that_of_transformers(names, algorithm, load):
    settings = {"eos_token_id": 33, "pad_token_id": 0, **{name: COMPUTED[name] for name in names}}
    loaded, _ = load(settings)
    ids = loaded.original.generate(torch.tensor([PROMPT]), max_new_tokens=14, do_sample=False)
    with loaded.engine(algorithm=algorithm, max_batch_size=2, max_context_len=64) as engine:
        (request,) = engine.generate([PROMPT], loaded.sampling_params(max_new_tokens=14))
    assert request.output_ids == ids[0, len(PROMPT) :].tolist()


def test_tokens_outside_of_the_vocabulary_are_left_out(load):
    settings = {
        "suppress_tokens": [-1, 5, 5000], "bad_words_ids": [[2]], "eos_token_id": 2,
        "sequence_bias": [[[5], 2.0], [[6], 3.0]],
    }  # fmt: skip
    loaded, _ = load(settings)
    assert loaded.sampling_params().logit_bias == {5: -math.inf, 6: 3.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, {2}), ({"eos_token_id": None}, set()), ({"eos_token_id": 9}, {9}),
     ({"eos_token_id": [9, 4, 5000]}, {9, 4}), (None, {2})],
)  # fmt: skip
def test_stop_tokens_of_null_are_none(settings, expected, tmp_path):
    write_checkpoint(tmp_path, "llama", byte_level_tokenizer())
    own, file = tmp_path / "generation_config.json", tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 2}))
    own.unlink(missing_ok=True)
    if settings is not None:
        own.write_text(json.dumps(settings))
    loaded = models.load(tmp_path, device="cpu", check=False, fuse=False)
    assert loaded.sampling_params().stop_token_ids == expected
    vocab_size = loaded.model.config.vocab_size
    assert models.FolderTokenizer(tmp_path, vocab_size).stop_ids == expected
    tokenizer = models.FolderTokenizer(tmp_path, vocab_size)
    assert tokenizer.sampling_params(seed=4) == loaded.sampling_params(seed=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", 3), ("bad_words_ids", [3]), ("sequence_bias", [1, 2]),
        ("min_new_tokens", "x"), ("min_new_tokens", [3]), ("repetition_penalty", "x"),
    ],
)  # fmt: skip
def test_a_malformed_setting_is_refused_by_name(name, value):
    model = small_model("llama")
    setattr(model.generation_config, name, value)
    with pytest.raises(CheckpointError, match=f"{name} is malformed"):
        models.load(model, device="cpu", check=False, fuse=False)


def test_the_settings_of_a_model_object_count(caplog):
    model = small_model("llama")
    model.generation_config.no_repeat_ngram_size = 3
    model.generation_config.eos_token_id = [4, 5]
    with caplog.at_level(logging.WARNING, "graphkit"):
        loaded = models.load(model, device="cpu", check=False, fuse=False)
    assert "LlamaForCausalLM" in caplog.text
    assert "no_repeat_ngram_size" in caplog.text
    assert loaded.sampling_params().stop_token_ids == {4, 5}
