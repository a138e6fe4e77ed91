"""A setting of config.json that the model's code does not read is refused if it changes text."""

from __future__ import annotations

import json
import logging

import pytest
from transformers.models.llama.modeling_llama import LlamaAttention

from graphkit import models
from graphkit.errors import CheckpointError, ConfigError, GraphkitError
from graphkit.models.load_check import check_keys
from small_models import KINDS, small_config, small_model

UNREAD = {
    "llama": [
        {"final_logit_softcapping": 30.0}, {"attn_logit_softcapping": 50.0}, {"qk_norm": True},
        {"sliding_window": 16}, {"layer_types": ["sliding_attention", "full_attention"]},
        {"logit_scale": 0.06}, {"attention_multiplier": 0.01}, {"residual_multiplier": 0.2},
        {"embedding_multiplier": 12.0}, {"partial_rotary_factor": 0.5}, {"alibi": True},
        {"attention_chunk_size": 64}, {"query_pre_attn_scalar": 256}, {"no_rope_layers": [1, 0]},
        {"clip_qkv": 8.0}, {"scale_emb": 12}, {"rope_interleave": True},
    ],
    "gpt2": [{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"sliding_window": 16}],
    "opt": [{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}],
    "qwen3": [{"logits_scaling": 8.0}, {"final_logit_softcapping": 30.0}],
    "mistral": [{"attn_logit_softcapping": 30.0}],
}  # fmt: skip
OFF = {
    "llama": {
        "sliding_window": None, "qk_norm": False, "logit_scale": 1.0, "residual_multiplier": 1,
        "attention_chunk_size": 0, "partial_rotary_factor": 1.0, "no_rope_layers": [],
        "layer_types": ["full_attention", "full_attention"], "final_logit_softcapping": None,
        "rope_scaling": None, "pretraining_tp": 1, "attention_bias": False, "is_causal": True,
    },
    "qwen3": {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2},
    "gpt2": {"rope_scaling": {"rope_type": "default"}, "sliding_window": 128},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """``folder(kind, entries)``: a folder of a type with these entries in its config.json."""

    def make(kind, entries):
        small_model(kind).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("kind", "entries"), [(kind, each) for kind, listed in UNREAD.items() for each in listed]
)
def test_a_setting_that_would_change_text_is_refused_by_name(kind, entries, folder):
    (name,) = entries
    with pytest.raises(CheckpointError, match=rf"sets {name} to .* does not read") as caught:
        models.load(folder(kind, entries), device="cpu", check=False, fuse=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [False, True], ids=["one", "by type of layer"])
def test_settings_of_a_rotation_that_no_code_reads_are_refused(layers, folder):
    """Issue 57: dynamic scaling by ``alpha`` is a setting of Hunyuan, which Llama ignores."""
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "finetuned": True}

    def load(value):
        kind = "gemma3_text" if layers else "llama"
        default = {"rope_type": "default", "rope_theta": 10000.0}
        rotation = {"full_attention": value, "sliding_attention": default} if layers else value
        models.load(folder(kind, {"rope_parameters": rotation}), device="cpu", check=False)

    load(settings)
    with pytest.raises(CheckpointError, match=r"sets rope_parameters\.alpha to 1000\.0"):
        load(settings | {"alpha": 1000.0})


@pytest.mark.parametrize("kind", OFF)
def test_a_value_that_changes_nothing_is_taken(kind, folder):
    models.load(folder(kind, OFF[kind]), device="cpu", check=False, fuse=False)


def test_what_no_code_reads_is_listed_once(folder, caplog):
    path = folder("llama", {"rms_norm_epsilon": 1e-5, "a_later_setting": 3, "use_cache": True})
    with caplog.at_level(logging.INFO, "graphkit"):
        models.load(path, device="cpu", check=False, fuse=False)
    (text,) = [r.getMessage() for r in caplog.records if "does not read" in r.getMessage()]
    assert "rms_norm_epsilon, a_later_setting, which its model does not read" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_type_is_refused_for_its_own_settings(kind, tmp_path):
    config = small_config(kind)
    config.save_pretrained(tmp_path)
    check_keys(tmp_path, small_model(kind))


def test_attention_to_later_tokens_is_refused_without_the_check(folder, monkeypatch):
    for value in (False, None, 0):
        with pytest.raises(ConfigError, match="sets is_causal to false"):
            models.load(folder("llama", {"is_causal": value}), device="cpu", check=False)
    forward = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda *args, **kwargs: forward(*args, **kwargs, is_causal=False)
    )
    with pytest.raises(ConfigError, match="passes is_causal=False to its attention"):
        models.load(small_model("llama"), device="cpu", check=False)


@pytest.mark.parametrize("entries", [{"sliding_window": {}}, {"num_hidden_layers": -1}])
def test_a_value_without_sense_is_no_raw_error(entries, folder):
    with pytest.raises(GraphkitError):
        models.load(folder("llama", entries), device="cpu", check=False, fuse=False)
