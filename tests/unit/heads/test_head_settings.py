"""Each setting of a draft head's config.json is used, has no effect, or is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from training.folders import save_draft_head
from transformers import Qwen3Config

from causal_attention import causal_attend, run_head
from graphkit.errors import CheckpointError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.load import head_algorithm, load_head

KINDS = ("eagle", "eagle3", "dflash")
NESTED = {"eagle": "eagle_config", "eagle3": "eagle_config", "dflash": "dflash_config"}
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def dflash(target):
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        )  # fmt: skip
    options = {"target_layer_ids": (0,), "block_size": 4, "mask_token_id": 95}
    return DFlashHead(config, target, **options).requires_grad_(False)


@pytest.fixture
def load(target, tmp_path, request):
    """``load(kind, entries)``: the head of a folder with these entries in its config.json."""

    def make(kind, entries, state=None):
        save_draft_head(request.getfixturevalue(kind), tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        if state is not None:
            save_file(state, tmp_path / "model.safetensors")
        return load_head(kind.upper(), tmp_path, target)

    return make


def either(kind, entries):
    """Return the entries as they are, and within the object of the authors or of ModelOpt."""
    return [entries, {NESTED[kind]: entries}]


ANY = [
    {"parallel_drafting": True}, {"parallel_draft_step": 4},
    {"logit_scale": 0.5}, {"attention_multiplier": 0.1}, {"residual_multiplier": 0.2},
    {"embedding_multiplier": 12.0}, {"attention_sinks": True},
    {"clip_qkv": 8.0}, {"rope_interleave": True}, {"a_later_setting": "on"},
    {"rope_scaling": {"rope_type": "default", "beta_fast": 3}},
]  # fmt: skip
REFUSED = {
    "eagle": [
        {"layernorms": True}, {"use_last_layernorm": True}, {"draft_vocab_size": 32},
        {"use_input_layernorm_in_first_layer": True}, {"use_aux_hidden_state": True},
        {"norm_before_residual": True}, {"is_causal": False}, {"final_logit_softcapping": 30.0},
    ],
    "eagle3": [
        {"use_mtp_layernorm": True}, {"use_last_layernorm": False}, {"fc_norm": True},
        {"use_input_layernorm_in_first_layer": False}, {"norm_before_fc": True},
        {"norm_output": True}, {"num_aux_hidden_states": 4}, {"use_aux_hidden_state": False},
        {"is_causal": False}, {"final_logit_softcapping": 30.0},
    ],
    "dflash": [
        {"causal": True}, {"is_causal": True}, {"use_swa": True}, {"swa_window_size": 64},
        {"fc_layernorm": True},
        {"attention_sink_bias": True}, {"add_swa_attention_sink_bias": True},
        {"is_neox_style": False}, {"projector_type": "domino"}, {"shift_label": True},
        {"draft_vocab_size": 32}, {"num_target_layers": 40},
    ],
}  # fmt: skip
CASES = [
    (kind, settings)
    for kind, own in REFUSED.items()
    for entries in (*ANY, *own)
    for settings in either(kind, entries)
]
CASES.append(("dflash", {"dflash_config": {"sliding_window": 64}}))


@pytest.mark.parametrize(("kind", "entries"), CASES)
def test_a_setting_that_changes_what_a_head_computes_is_refused_by_name(kind, entries, load):
    (name,) = entries.get(NESTED[kind], entries)
    with pytest.raises(CheckpointError, match=name) as caught:
        load(kind, entries)
    assert "\n" not in str(caught.value)
    assert "CaptureTarget" not in str(caught.value)


WITHOUT_EFFECT = {
    "transformers_version": "4.56.0", "torch_dtype": "bfloat16", "use_cache": True,
    "auto_map": {"AutoModel": "x.Y"}, "_name_or_path": "here", "pretraining_tp": 1,
    "initializer_range": 0.02, "attention_dropout": 0.1, "bos_token_id": 1, "mlp_bias": False,
    "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
    "is_decoder": True, "temperature": 0.5, "parallel_drafting": False, "parallel_draft_step": 1,
    "target_hidden_size": 64, "next_layer_regular": True, "logit_scale": 1.0, "is_causal": True,
    "architectures": ["Any"], "has_no_defaults_at_init": False, "embed_requires_grad": False,
    "enable_sp_ulysses": False, "target_model_type": "qwen3", "speculators_version": "0.1.0",
    "use_swa": False, "norm_output": False, "norm_before_fc": False, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}, "max_length": 2048,
    "a_later_setting": None, "another_setting": False, "position_embedding_type": "rope",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_settings_without_effect_are_taken(kind, load, request):
    own = {
        "eagle": {"bias": False, "use_last_layernorm": False, "layernorms": False},
        "eagle3": {"num_aux_hidden_states": 3, "use_last_layernorm": True, "eagle_config": {
            "use_aux_hidden_state": True, "use_mtp_layernorm": False, "next_layer_regular": True,
            "use_input_layernorm_in_first_layer": True, "parallel_draft_step": 1,
        }},
        "dflash": {"num_target_layers": 2, "causal": False, "is_causal": False, "dflash_config": {
            "use_swa": False, "causal": False, "swa_window_size": None,
        }},
    }  # fmt: skip
    head = load(kind, WITHOUT_EFFECT | own[kind])
    for name, tensor in request.getfixturevalue(kind).state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("entries", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 3}, 3),
        ({"layer_types": ["full_attention"], "sliding_window": 3}, None),
        ({"sliding_window": 3}, None),
        ({"model_type": "mistral", "sliding_window": 3}, 3),
        ({"layer_types": ["sliding_attention"], "sliding_window": 128}, None),
    ],
)
def test_the_window_of_a_layer_is_that_of_its_type(kind, entries, window, load, request):
    head, original = load(kind, entries), request.getfixturevalue(kind)
    assert getattr(head.config, "sliding_window", None) == window
    assert head.prepare().attention[0].window == (window or 0)
    rows = torch.arange(5), torch.randn(5, 64), torch.arange(5)
    expected = run_head(original, *rows, causal_attend(1, 5, window))
    got = run_head(head, *rows, causal_attend(1, 5, window))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_window must be an int >= 1"),
        ({"layer_types": ["chunked_attention"]}, "layer_types"),
        ({"layer_types": "sliding_attention"}, "layer_types is .* a list"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 3},
            "sliding_attention in a layer of qwen3",
        ),
        ({"model_type": "gemma3_text"}, "Use a draft head whose layers are those of Llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "Use a draft head whose layers"),
        ({"num_hidden_layers": 2}, "Use a head of one layer"),
        ({IDS: []}, "is an empty list, which does not say"),
        ({IDS: None, "eagle_config": {IDS: []}}, "is an empty list, which does not say"),
        (
            {"norm_before_residual": False, "eagle_config": {"norm_before_residual": True}},
            "sets norm_before_residual to False, and eagle_config to True",
        ),
        ({"eagle_config": {IDS: [0, 0, 1]}}, rf"sets {IDS} to \[0, 1, 2\], and eagle_config to"),
    ],
)
def test_a_layer_that_is_not_computed_is_refused(entries, text, load):
    with pytest.raises(CheckpointError, match=text) as caught:
        load("eagle3", entries)
    assert "graphkit.models" not in str(caught.value)


def test_flags_of_the_nested_object_are_used(load, eagle3):
    entries = {"norm_before_residual": None, "eagle_config": {"norm_before_residual": True}}
    assert load("eagle3", entries).midlayer.norm_before_residual
    for kind in ("eagle", "eagle3"):
        entries = {"rope_theta": None, "eagle_config": {"rope_theta": 77.0}}
        assert load(kind, entries).config.rope_parameters["rope_theta"] == 77.0


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("eagle", "rope_theta", 77.0), ("eagle3", "rms_norm_eps", 0.5), ("dflash", "block_size", 8)],
)
def test_nested_settings_that_contradict_others_are_refused(kind, name, value, load):
    with pytest.raises(CheckpointError, match=rf"sets {name} to .*, and {NESTED[kind]} to {value}"):
        load(kind, {NESTED[kind]: {name: value}})


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_own", [False, True], ids=["shared", "own head and embedding"])
def test_speculators_eagle_heads_are_loaded(eagle, target, tmp_path, has_bias, has_own):
    state = dict(eagle.state_dict())
    if has_bias:
        state["fc.bias"] = torch.randn(64)
    renamed = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in state.items()
    }
    if has_own:
        renamed["lm_head.weight"] = torch.randn(96, 64)
        renamed["embed_tokens.weight"] = torch.randn(96, 64)
    layer = eagle.config.to_dict()
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "layernorms": False,
        "fusion_bias": has_bias, "speculators_model_type": "eagle", "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": "eagle", "proposal_methods": []},
        "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": layer,
        "torch_dtype": "float32", "transformers_version": "4.53.0",
    }  # fmt: skip
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert head_algorithm(tmp_path) == "EAGLE"
    head = load_head("EAGLE", tmp_path, target)
    for name, tensor in state.items():
        assert torch.equal(head.state_dict()[name], tensor)
    assert head.config == eagle.config
    if has_own:
        assert torch.equal(head.lm_head.weight, renamed["lm_head.weight"])
    for change in ({"layernorms": True}, {"transformer_layer_architecture": "MixtralDecoderLayer"}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=next(iter(change))):
            load_head("EAGLE", tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(config | {"fusion_bias": True}))
    if not has_bias:
        with pytest.raises(CheckpointError, match=r"has no fc.bias"):
            load_head("EAGLE", tmp_path, target)


def test_a_dflash_head_of_speculators_is_refused(load):
    with pytest.raises(CheckpointError, match="in the layout of Speculators"):
        load("dflash", {"transformer_layer_config": {"model_type": "qwen3"}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.k_scale", "fc.weight_scale", "extra_norm.weight", "lora_A.weight"]
)
def test_a_tensor_that_is_not_used_is_refused_by_name(kind, name, load, request):
    state = {**request.getfixturevalue(kind).state_dict(), name: torch.ones(1)}
    with pytest.raises(CheckpointError, match=name.rpartition(".")[2]) as caught:
        load(kind, {}, state)
    assert "CaptureTarget" not in str(caught.value)


def test_a_tensor_with_two_names_is_refused(load, eagle3):
    state = dict(eagle3.state_dict())
    name = "midlayer.mlp.up_proj.weight"
    state[name.replace("midlayer", "layers.0")] = state[name] + 1
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp.* and midlayer\.mlp.* one tensor"):
        load("eagle3", {}, state)
