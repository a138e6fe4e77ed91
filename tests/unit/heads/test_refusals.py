"""Invalid folders and settings are refused with one line that names the cause."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from training.folders import config_entries

from graphkit.errors import CheckpointError
from graphkit.models.heads.config import layer_config
from graphkit.models.heads.load import load_head

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def refused(folder, match, target=None):
    with pytest.raises(CheckpointError, match=match) as caught:
        load_head("EAGLE", folder, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"model_type": "gemma3"},
            "model_type 'gemma3', but only llama or mistral or qwen2 or",
        ),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', but only silu is supported"),
        ({"mlp_bias": True}, "mlp_bias True, but only False is supported"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "mistral", "sliding_window": "x"}, "Field 'sliding_window' expected int"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn', but only default or"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'rope_type'='dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_scaling": "llama3"}, "expected dict, got str"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "Missing required keys in `rope_parameters`"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "llama3 needs low_freq_factor <"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8, "factor": "8"}},
            "factor is '8', expected a number > 0",
        ),
        ({"rope_theta": "5"}, "rope_theta is '5', expected a number > 0"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\], expected a number > 0"),
        ({"vocab_size": None}, "Field 'vocab_size' expected int, got NoneType"),
        ({"num_attention_heads": 0}, "division or modulo by zero"),
        ({"num_hidden_layers": "2"}, "Field 'num_hidden_layers' expected int, got str"),
        ({"rms_norm_eps": "tiny"}, "Field 'rms_norm_eps' expected float, got str"),
        ({"tie_word_embeddings": "no"}, "Field 'tie_word_embeddings' expected bool, got str"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but it must divide"),
        ({"head_dim": 15}, "RoPE requires an even rotary dimension"),
    ],
)
def test_config_values(change, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        layer_config(CONFIG | change)
    assert "\n" not in str(caught.value)


def test_absent_keys_have_the_defaults_of_transformers():
    config = layer_config(CONFIG)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert not config.tie_word_embeddings
    assert layer_config(CONFIG | {"model_type": "qwen3"}).head_dim == 128
    rope = LLAMA3 | {"original_max_position_embeddings": 64}
    scaled = layer_config(CONFIG | {"rope_scaling": rope})
    assert rope.items() <= scaled.rope_parameters.items()
    assert config_entries(scaled)["rope_scaling"] == rope


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"max_position_embeddings": 2048}, None),  # 4096, longer than the context
        ({"max_position_embeddings": 32768}, 4096),
        ({"max_position_embeddings": 32768, "sliding_window": 100}, 100),
        ({"max_position_embeddings": 32768, "sliding_window": None}, None),
    ],
)
def test_a_mistral_attends_within_its_window(change, window):
    config = layer_config(CONFIG | {"model_type": "mistral"} | change)
    assert config.sliding_window == window
    assert config.max_position_embeddings == change["max_position_embeddings"]
    assert config_entries(layer_config(config_entries(config))) == config_entries(config)


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "^the checkpoint folder .*nowhere' does not exist")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "^the checkpoint folder .*file' does not exist")


def test_a_name_that_no_file_can_have():
    refused("x" * 300, "^cannot read 'x+/config.json': File name too long")
    refused("\0", "^cannot read .* null byte")


def test_no_config(tmp_path):
    refused(tmp_path, "contains no config.json")


@pytest.mark.parametrize(
    ("text", "match"),
    [(b"{", "not valid JSON"), (b"\xff\xfe\xff", "not valid JSON"), (b"[1]", r"got \[1\]")],
)
def test_config_is_no_object(checkpoint, text, match):
    (checkpoint / "config.json").write_bytes(text)
    refused(checkpoint, match)


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "contains none of model.safetensors, pytorch_model.bin and the index")


@pytest.mark.parametrize("keep", [0, 5, 100, -100])
def test_weights_cut_short(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(checkpoint, "model.safetensors' is not a valid safetensors file")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"model.norm.weight": 3}}', "has no weight_map"),
        ('{"weight_map": {"model.norm.weight": "two.safetensors"}}', "contains no two.safetensors"),
        ('{"weight_map": {"model.norm.weight": "one.safetensors"}}', "has no .* and 6 more"),
    ],
)
def test_index(checkpoint, target, index, match):
    (checkpoint / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(64)}, checkpoint / "one.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(index)
    refused(checkpoint, match, target)
