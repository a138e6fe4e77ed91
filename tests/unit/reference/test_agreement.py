"""The loader and the model against transformers' own logits."""

from __future__ import annotations

import json

import pytest
import torch

from graphkit.models.heads.config import LlamaConfig
from graphkit.models.sharded import full_logits, load_checkpoint, save_checkpoint

KINDS = [
    "llama",
    "llama-wide-heads",
    "llama-llama3",
    "llama-tied-bias",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-bias",
]


def assert_same(ours, theirs, rtol=1e-5):
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rtol * theirs.abs().max().item())


@torch.no_grad()
def theirs(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree(kind, hf_model, tmp_path, ids):
    model = hf_model(kind)
    model.save_pretrained(tmp_path)
    assert_same(full_logits(load_checkpoint(tmp_path), ids), theirs(model, ids))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_rounds_where_transformers_does(kind, hf_model, tmp_path, ids):
    from transformers import AutoModelForCausalLM

    hf_model(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    ours = full_logits(load_checkpoint(tmp_path, dtype=torch.bfloat16), ids)
    assert_same(ours, theirs(model, ids), rtol=0.002)


def test_sharded_checkpoint(hf_model, tmp_path, ids):
    model = hf_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(full_logits(load_checkpoint(tmp_path), ids), theirs(model, ids))


def test_rope_keys_of_transformers_4(hf_model, tmp_path, ids):
    model = hf_model("llama-llama3")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    path.write_text(json.dumps(config))
    assert_same(full_logits(load_checkpoint(tmp_path), ids), theirs(model, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_we_save(kind, hf_model, tmp_path, ids):
    from transformers import AutoModelForCausalLM

    model = hf_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(ours, tmp_path / "ours")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    saved = type(model).__name__
    saved = saved if kind == "mistral-window" else saved.replace("Mistral", "Llama")
    assert type(again).__name__ == saved
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(full_logits(ours, ids), theirs(again, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_config_survives_the_round_trip(kind, hf_model):
    config = LlamaConfig.from_dict(hf_model(kind).config.to_dict())
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("kind", ["llama", "llama-tied-bias", "qwen3-bias"])
def test_state_dict_loads_one_to_one(kind, hf_model):
    from graphkit.models.sharded import LlamaModel

    theirs = hf_model(kind)
    ours = LlamaModel(LlamaConfig.from_dict(theirs.config.to_dict()))
    assert str(ours.load_state_dict(theirs.state_dict(), strict=True)) == (
        "<All keys matched successfully>"
    )


def test_a_stored_head_equal_to_the_tied_embedding_is_accepted(hf_model, tmp_path, ids):
    from safetensors.torch import load_file, save_file

    model = hf_model("llama-tied-bias")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, tmp_path / "model.safetensors")
    ours = load_checkpoint(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same(full_logits(ours, ids), theirs(model, ids))
