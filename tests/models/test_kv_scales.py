"""Scales of keys and values in a folder reach the pools of float8_e4m3fn."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

import graphkit as gk
from graphkit import models
from graphkit.errors import CheckpointError
from quantized_folders import LAYOUTS, change_settings, write_quantized
from small_models import small_model

FP8 = torch.float8_e4m3fn
FACTOR = 2.0**11
"""Keys and values are larger by this power of two, so that rounding is the same with its scale."""
SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
    "autofp8": ("kv_scale",),
}
PROMPT = [5, 17, 3, 17, 3, 17, 9, 40, 41, 8]


def generated(loaded, dtype=FP8):
    with loaded.engine(max_batch_size=1, max_context_len=64, kv_dtype=dtype) as engine:
        (request,) = engine.generate([PROMPT], gk.SamplingParams(max_new_tokens=12))
    return request.output_ids


def with_large_keys(folder, names, scale=None):
    """Save a model whose keys and values are larger by ``FACTOR``, with scales of these names."""
    small_model("llama").save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] *= FACTOR
        elif name.endswith(("q_proj.weight", "o_proj.weight")):
            tensors[name] /= FACTOR
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(FACTOR)
        if scale is None
        else scale.clone()
        for layer in range(2)
        for name in names
    }
    save_file(tensors | scales, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def expected():
    """The text of the model itself over pools of FP8."""
    return generated(models.load(small_model("llama"), device="cpu"))


@pytest.mark.parametrize("tool", NAMES)
def test_scales_reach_the_pools(tmp_path, tool, expected):
    with_large_keys(tmp_path, NAMES[tool])
    assert generated(models.load(tmp_path, device="cpu")) == expected


def test_pools_of_other_dtypes_do_not_use_them(tmp_path):
    with_large_keys(tmp_path, NAMES["compressed-tensors"])
    plain = generated(models.load(small_model("llama"), device="cpu"), None)
    assert generated(models.load(tmp_path, device="cpu"), None) == plain


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1, 1)])
def test_heads_may_have_scales_of_their_own(tmp_path, shape, expected):
    with_large_keys(tmp_path, NAMES["compressed-tensors"], scale=torch.full(shape, FACTOR))
    assert generated(models.load(tmp_path, device="cpu")) == expected


@pytest.mark.parametrize("name", ["modelopt", "compressed fp8 channel", "awq"])
def test_quantised_folders_have_them_too(tmp_path, name, caplog):
    write_quantized(tmp_path / "folder", name)
    file = tmp_path / "folder" / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.25 + layer)
        for layer in range(2)
        for name in NAMES["modelopt"]
    }
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="graphkit"):
        loaded = models.load(tmp_path / "folder", device="cpu")
    assert [layer.key_scale for layer in loaded.layout.attention] == [(0.25,), (1.25,)]
    assert "scales of keys and values, which pools of float8_e4m3fn" in caplog.text


def test_a_folder_may_have_scales_alone(tmp_path, expected):
    with_large_keys(tmp_path, NAMES["compressed-tensors"])
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    change_settings(tmp_path, settings | SCHEME)
    assert generated(models.load(tmp_path, device="cpu")) == expected


def test_scales_for_eight_bit_integers_are_not_used(tmp_path, caplog):
    write_quantized(tmp_path / "folder", "awq")
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    change_settings(tmp_path / "folder", LAYOUTS["awq"][0] | scheme)
    file = tmp_path / "folder" / "model.safetensors"
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(3.0)}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="graphkit"):
        loaded = models.load(tmp_path / "folder", device="cpu")
    assert not loaded.layout.attention[0].key_scale
    assert "in another format than FP8" in caplog.text


@pytest.mark.parametrize(
    ("name", "scale", "text"),
    [
        ("model.layers.0.self_attn.k_scale", torch.ones(3), "has 3 scales of keys or values"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(-1.0), "expected positive numbers"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(torch.nan), "expected positive numbers"),
        ("model.layers.0.mlp.k_scale", torch.ones(1), "which does not attend"),
        ("model.layers.0.attention.k_scale", torch.ones(1), "which does not attend"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, name, scale, text):
    small_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: scale}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=text):
        models.load(tmp_path, device="cpu")


def test_latents_have_no_scales(tmp_path, caplog):
    small_model("deepseek_v3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, logger="graphkit"):
        loaded = models.load(tmp_path, device="cpu")
    assert not loaded.layout.attention[0].key_scale
    assert "but not for latents" in caplog.text
