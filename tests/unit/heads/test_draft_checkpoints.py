"""Draft heads from local folders: loading and errors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training.folders import save_draft_head

from causal_attention import causal_attend, run_head
from graphkit.errors import CheckpointError
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.load import head_algorithm, load_head

KINDS = ("eagle", "eagle3")


def write(folder, state, config, **more):
    """Write a folder as published checkpoints have it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more))
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def eagle_folder(eagle, tmp_path):
    return write(
        tmp_path / "eagle",
        eagle.state_dict(),
        eagle.config,
        architectures=["EagleLlamaForCausalLM"],
    )


@pytest.fixture
def eagle3_folder(eagle3, tmp_path):
    is_drafted = torch.zeros(96, dtype=torch.bool)
    is_drafted[eagle3.token_map] = True
    return write(
        tmp_path / "eagle3", eagle3.state_dict() | {"t2d": is_drafted}, eagle3.config,
        draft_vocab_size=32, architectures=["LlamaForCausalLMEagle3"],
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip


def to_bin(folder):
    """Convert a folder's safetensors to ``torch.save`` format."""
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def edit(folder, **changes):
    """Replace tensors by name, dots written as two underscores; ``None`` deletes."""
    path = folder / "model.safetensors"
    changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    state = load_file(path) | changed
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)


def refused(kind, folder, target, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        load_head(kind, folder, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_what_was_written_is_read(kind, is_bin, target, request):
    head, folder = (request.getfixturevalue(name) for name in (kind, f"{kind}_folder"))
    if is_bin:
        to_bin(folder)
    loaded = load_head(kind.upper(), str(folder), target)
    assert loaded.config == head.config
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.rotary_emb.inv_freq, head.rotary_emb.inv_freq)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_loaded_head_computes_what_the_saved_one_did(eagle, eagle_folder, target):
    rows = torch.arange(5), torch.randn(5, 64), torch.arange(5), causal_attend(1, 5)
    expected = eagle.logits(run_head(eagle, *rows))
    loaded = load_head("EAGLE", eagle_folder, target)
    assert torch.equal(loaded.logits(run_head(loaded, *rows)), expected)


def test_nothing_borrowed_is_in_the_file(eagle, target, tmp_path):
    save_draft_head(eagle, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert set(stored.keys()) == set(eagle.state_dict())
        assert not any("embed" in key or "lm_head" in key for key in stored.keys())  # noqa: SIM118
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_bias_and_embedding_come_from_the_file(eagle, eagle_folder, target, is_bin):
    bias, embedding = torch.randn(64), torch.randn(96, 64)
    edit(eagle_folder, fc__bias=bias, embed_tokens__weight=embedding)
    if is_bin:
        to_bin(eagle_folder)
    loaded = load_head("EAGLE", eagle_folder, target)
    assert torch.equal(loaded.fc.bias, bias)
    assert torch.equal(loaded.embed_tokens.weight, embedding)
    rows = loaded._inputs(torch.arange(96), torch.zeros(96, 64))
    assert torch.equal(rows[:, :64], embedding)


def test_device_and_dtype_follow_the_target(eagle_folder, target):
    target.to(torch.bfloat16)
    assert load_head("EAGLE", eagle_folder, target).fc.weight.dtype == torch.bfloat16


def test_rotary_frequencies_of_old_exports_are_left(eagle_folder, target):
    edit(eagle_folder, layers__0__self_attn__rotary_emb__inv_freq=torch.ones(12))
    load_head("EAGLE", eagle_folder, target)


def test_eagle3_with_a_full_vocabulary(eagle3, eagle3_folder, target):
    """SpecForge writes d2t then, too, with differences of 0."""
    state = eagle3.state_dict() | {"lm_head.weight": torch.ones(96, 64)}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    state["d2t"] = torch.zeros(96, dtype=torch.int64)
    loaded = load_head("EAGLE3", write(eagle3_folder, state, eagle3.config, **layers), target)
    assert loaded.token_map.tolist() == list(range(96))
    del state["d2t"]
    loaded = load_head("EAGLE3", write(eagle3_folder, state, eagle3.config, **layers), target)
    assert loaded.d2t is None
    assert loaded.lm_head.out_features == 96


@pytest.mark.parametrize("kind", KINDS)
def test_another_target(kind, make_target, request):
    folder, other = request.getfixturevalue(f"{kind}_folder"), make_target(256, 256, 4)
    refused(kind.upper(), folder, other, "has hidden_size 64, but its target has 256")


@pytest.mark.parametrize("kind", KINDS)
def test_no_folder_and_no_weights(kind, target, tmp_path, request):
    refused(kind.upper(), tmp_path / "nowhere", target, "the checkpoint folder .* does not exist")
    folder = request.getfixturevalue(f"{kind}_folder")
    (folder / "model.safetensors").unlink()
    refused(kind.upper(), folder, target, "pytorch_model.bin and the index of either")


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("eagle", {"fc__weight": None}, "has no fc.weight"),
        ("eagle", {"fc__weight": torch.ones(64, 64)}, r"shape \[64, 64\], .* requires \[64, 128\]"),
        ("eagle", {"fc__weight": torch.ones(64, 128).char()}, "stored as I8"),
        ("eagle", {"fc__bias": torch.ones(63)}, r"fc.bias has shape \[63\]"),
        ("eagle", {"norm__weight": torch.ones(64)}, "has norm.weight"),
        ("eagle", {"layers__0__input_layernorm__weight": torch.ones(64)}, "input_layernorm"),
        ("eagle", {"layers__1__mlp__up_proj__weight": torch.ones(112, 64)}, "has layers.1.mlp"),
        ("eagle", {"embed_tokens__weight": torch.ones(95, 64)}, r"\[95, 64\], .*\[96, 64\]"),
        ("eagle", {"t2d": torch.ones(96)}, "has t2d"),
        ("eagle3", {"fc__weight": torch.ones(64, 128)}, r"requires \[64, 192\]"),
        ("eagle3", {"d2t": torch.ones(32)}, "d2t is stored as F32, but only I64, I32"),
        ("eagle3", {"d2t": None}, "has no d2t"),
        ("eagle3", {"lm_head__weight": torch.ones(96, 64)}, r"\[96, 64\], .*\[32, 64\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_tensors(kind, changes, match, is_bin, target, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    edit(folder, **changes)
    if is_bin:
        to_bin(folder)
        match = match.replace("I8", "torch.int8")
    refused(kind.upper(), folder, target, match)


def test_folders_say_which_eagle_they_have(eagle_folder, eagle3_folder):
    assert (head_algorithm(eagle_folder), head_algorithm(eagle3_folder)) == ("EAGLE", "EAGLE3")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 32}, "must have num_hidden_layers 1, got 32"),
        ({"vocab_size": 97}, "has vocab_size 97, but its target has 96"),
        ({"model_type": "eagle"}, "model_type 'eagle', but only llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_config(change, match, eagle_folder, target):
    path = eagle_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused("EAGLE", eagle_folder, target, match)


@pytest.mark.parametrize("vocab_size", [0, "32"])
def test_draft_vocabulary(vocab_size, eagle3, eagle3_folder, target):
    write(eagle3_folder, eagle3.state_dict(), eagle3.config, draft_vocab_size=vocab_size)
    refused("EAGLE3", eagle3_folder, target, "draft_vocab_size must be an int >= 1")


def test_a_head_with_its_own_embedding_keeps_it(eagle, target, tmp_path):
    own = EagleHead(eagle.config, target, has_embedding=True)
    save_draft_head(own, tmp_path)
    loaded = load_head("EAGLE", tmp_path, target)
    assert torch.equal(loaded.embed_tokens.weight, own.embed_tokens.weight)
