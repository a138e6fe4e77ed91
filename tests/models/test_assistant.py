"""Assistants of Gemma 4 read the keys and values of their target, and fit no other."""

from __future__ import annotations

import json

import pytest
import torch

import graphkit as gk
from drafted_models import assistant, gemma4, with_assistant
from graphkit import models
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import CheckpointError, ConfigError
from small_models import small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return with_assistant(tmp_path_factory.mktemp("draft"))


def texts(loaded, sampling, **options):
    sizes = {"num_steps": 3, "max_batch_size": 3, "max_context_len": 64, "batch_sizes": [3]}
    with loaded.engine(**sizes | options) as engine:
        engine.capture()
        return [each.output_ids for each in engine.generate(PROMPTS, sampling)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lengths_pools_and_pages_change_no_text(loaded, temperature, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    sampling = gk.SamplingParams(max_new_tokens=14, temperature=temperature, seed=3)
    plain = texts(loaded, sampling, algorithm="NONE")
    for generation in ("v1", "v2", "v3"):
        options = {"generation": generation, "page_size": 4, "num_steps": (0, 1, 3)}
        assert texts(loaded, sampling, **options) == plain
    small = {"kv_slots": 63, "steps_per_launch": 1}
    assert texts(loaded, sampling, generation="v3", topk=2, **small) == plain
    eight = {"kv_dtype": torch.float8_e4m3fn}
    plain = texts(loaded, sampling, algorithm="NONE", **eight)
    assert texts(loaded, sampling, generation="v2", topk=2, **eight) == plain


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False])
def test_an_assistant_of_the_unified_type_drafts_for_a_target_that_shares_no_keys(fuse):
    target = small_model("gemma4_unified_text", global_head_dim=32)
    draft = assistant("gemma4_unified", use_ordered_embeddings=False)
    loaded = models.load(target, draft=draft, device="cpu", fuse=fuse)
    assert loaded.algorithm == "EAGLE"
    sampling = gk.SamplingParams(max_new_tokens=14)
    plain = texts(loaded, sampling, algorithm="NONE")
    assert texts(loaded, sampling, generation="v3", topk=2) == plain


def test_it_has_no_pools_and_needs_those_of_its_target(loaded):
    spec, requests = loaded.spec(), ReqToTokenPool(2, 32, loaded.device)
    target = loaded.engine_model(requests, spec)
    model = loaded.draft.engine_model(requests, spec, target=target)
    assert model.kv_pools == target.kv_pools
    assert loaded._slot_bytes(spec, None) == loaded._slot_bytes(loaded.spec("NONE"), None)
    with pytest.raises(ConfigError, match="Pass what engine_model of the target returned"):
        loaded.drafter(requests, spec)


OTHERS = {
    "backbone_hidden_size 64, but its target has 32": {"hidden_size": 32},
    "vocab_size 128, but its target has 96": {"vocab_size": 96},
    "head_dim of sliding_attention 16, but its target has 8": {"head_dim": 8},
    "num_attention_heads % num_key_value_heads of sliding_attention 1": {
        "num_key_value_heads": 3, "num_attention_heads": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", OTHERS)
def test_a_target_of_other_sizes_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        models.load(gemma4(**OTHERS[message]), draft=assistant(), device="cpu", check=False)


def test_a_target_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no such layer with keys of its"):
        models.load(small_model("llama"), draft=assistant(), device="cpu")


@pytest.mark.parametrize("name", ["clip_qkv", "another.weight"])
def test_nothing_of_a_folder_is_ignored(name, tmp_path):
    model = assistant()
    if name == "another.weight":
        model.another = torch.nn.Linear(2, 2, bias=False)
    model.save_pretrained(tmp_path)
    if name == "clip_qkv":
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: 8.0}))
    with pytest.raises(CheckpointError, match=name):
        models.load(gemma4(), draft=tmp_path, device="cpu", check=False)
