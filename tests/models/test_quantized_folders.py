"""Folders with quantised layers against the same models with dequantised weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import graphkit as gk
from graphkit import ConfigError, models
from graphkit.errors import CheckpointError
from graphkit.models.quantization import weight
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.ops import quantized_layout, quantized_linear
from quantized_folders import LAYOUTS, change_settings, linears, write_quantized

PROMPT = [5, 17, 3, 17, 3, 17, 9]
every_layout = pytest.mark.parametrize("name", LAYOUTS)


def continued(model, count=8):
    ids = torch.tensor([PROMPT])
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@every_layout
def test_text_and_logits_are_those_of_the_dequantised_model(tmp_path, name):
    expected = write_quantized(tmp_path, name)
    loaded = models.load(tmp_path, device="cpu")
    for path, layer in linears(expected):
        quantized = loaded.original.get_submodule(path)
        assert isinstance(quantized, QuantizedLinear), path
        got = quantized.quantized.dequantized(torch.float32)
        assert torch.equal(got, layer.weight), path
    ids = torch.tensor([PROMPT])
    got = loaded.original(ids).logits
    torch.testing.assert_close(got, expected(ids).logits, rtol=1e-4, atol=1e-4)
    assert "one product of" in str(loaded.layout.replaced)
    with loaded.engine(
        num_steps=3, max_batch_size=2, max_context_len=64, generation="v3"
    ) as engine:
        engine.capture()
        (request,) = engine.generate([PROMPT], gk.SamplingParams(max_new_tokens=8))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    assert request.output_ids == continued(expected)


@pytest.mark.parametrize("name", ["awq", "fp8 blocks"])
def test_biases_and_tied_heads_are_read(tmp_path, name):
    expected = write_quantized(tmp_path, name, "qwen2", tie_word_embeddings=True)
    ids = torch.tensor([PROMPT])
    for bias in (layer.bias for _, layer in linears(expected) if layer.bias is not None):
        assert bias.abs().max() > 0, "random"
    loaded = models.load(tmp_path, device="cpu")
    assert loaded.head.weight is loaded.model.model.embed_tokens.weight
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_quantised_head_becomes_a_plain_one(tmp_path, is_tied):
    expected = write_quantized(tmp_path, "gptq")
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    parts, weight = LAYOUTS["gptq"][1](tensors.pop("lm_head.weight"))
    save_file(tensors | {f"lm_head.{key}": part for key, part in parts.items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": is_tied}))
    expected.lm_head.weight.data = weight
    loaded = models.load(tmp_path, device="cpu")
    assert type(loaded.head) is nn.Linear
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("awq", {"group_size": 32}, "group_size of awq is 32, and graphkit reads 128 or -1"),
        ("awq", {"version": "gemv"}, "version of awq is 'gemv'"),
        ("gptq", {"desc_act": True}, "desc_act of gptq is True"),
        ("gptq", {"bits": 8}, "bits of gptq is 8"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "checkpoint_format of gptq is 'gptq_v2'"),
        ("compressed int4", {"format": "int-quantized"}, "format of compressed-tensors is 'int"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, r"weight_block_size of fp8 is \[64, 64\]"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, r"dynamic of gptq is \['\+:"),
        (
            "compressed fp8 channel",
            {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            r"transform_config \(rotations\) of compressed-tensors",
        ),
        (
            "compressed fp8 channel",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format of sparsity_config of compressed-tensors is 'sparse-24-bitmask'",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_settings_are_refused(tmp_path, name, changes, text):
    write_quantized(tmp_path, name)
    change_settings(tmp_path, LAYOUTS[name][0] | changes)
    if name != "fp8 blocks":  # transformers dequantises these on the CPU
        with pytest.raises(CheckpointError, match=text) as caught:
            models.load(tmp_path, device="cpu")
        assert "cannot be loaded by transformers" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_type": "unknown"}, "cannot be loaded by transformers"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
            "needs Python code from its folder.* trust_remote_code=True",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_transformers_does_not_have_is_refused(tmp_path, settings, text):
    write_quantized(tmp_path, "awq")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=text):
        models.load(tmp_path, device="cpu")


def damaged(tmp_path, name, change):
    write_quantized(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("awq", lambda t: t.pop(f"{UP}.scales"), f"{UP} has no scales, which awq needs"),
        (
            "gptq",
            lambda t: t.update({f"{UP}.g_idx": t[f"{UP}.g_idx"].flip(0) + 1}),
            f"tensors of {UP} do not fit the layout of gptq: its inputs are in another order",
        ),
        (
            "awq",
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].repeat(4, 1)}),
            f"tensors of {UP} do not fit",
        ),
        ("fp8 blocks", lambda t: t.pop("model.norm.weight"), r"no model\.norm\.weight"),
        (
            "compressed int4 asymmetric",
            lambda t: t.pop(f"{UP}.weight_zero_point"),
            f"{UP} has no weight_zero_point, which compressed-tensors needs",
        ),
        (
            "compressed int4",
            lambda t: t.update({f"{UP}.weight_shape": torch.tensor([100, 128])}),
            "tensors of .*up_proj do not fit the layout|have the shape",
        ),
    ],
    ids=["missing", "order", "groups", "norm", "zero points", "shape"],
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_folders_are_refused(tmp_path, name, change, text):
    damaged(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=text):
        models.load(tmp_path, device="cpu")


def test_layers_of_one_product_are_quantised_together_in_the_fast_layout(tmp_path):
    def restore(tensors):
        path = "model.layers.0.self_attn.k_proj"
        for name in [name for name in tensors if name.startswith(path)]:
            del tensors[name]
        tensors[f"{path}.weight"] = torch.zeros(64, 128)

    damaged(tmp_path, "awq", restore)
    loaded = models.load(tmp_path, device="cpu")
    assert type(loaded.model.model.layers[0].self_attn.k_proj) is nn.Linear


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("awq", {"rotate": "hadamard"}, "quantization_config of awq has rotate=hadamard"),
        ("fp8 blocks", {"weight_offset": 0.5}, "has weight_offset=0.5"),
        ("gptq", {"adapter": {"path": "lora"}}, "has adapter="),
        ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo of modelopt is 'NVFP4'"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo of modelopt is 'W4A8_AWQ'"),
        ("awq", {"quant_method": "unheard-of"}, "'unheard-of', which neither graphkit nor"),
        ("awq", {"quant_method": None}, "method None, which neither graphkit nor"),
        ("awq", {"quant_method": ["awq"]}, r"method \['awq'\], which neither graphkit nor"),
    ],
)
def test_settings_that_nothing_reads_are_refused(tmp_path, name, changes, text):
    write_quantized(tmp_path / "folder", name)
    change_settings(tmp_path / "folder", LAYOUTS[name][0] | changes)
    with pytest.raises(CheckpointError, match=text):
        models.load(tmp_path / "folder", device="cpu")


def test_unknown_settings_of_a_group_are_refused(tmp_path):
    write_quantized(tmp_path / "folder", "compressed int4")
    settings = json.loads(json.dumps(LAYOUTS["compressed int4"][0]))
    settings["config_groups"]["group_0"]["weights"]["bias_correction"] = "mean"
    change_settings(tmp_path / "folder", settings)
    with pytest.raises(CheckpointError, match=r"group_0\.weights .* bias_correction"):
        models.load(tmp_path / "folder", device="cpu")


@pytest.mark.parametrize("place", ["hf_quant_config.json", "compression_config"])
def test_settings_are_found_where_tools_write_them(tmp_path, place):
    name = "compressed fp8 channel" if place == "compression_config" else "modelopt"
    expected = write_quantized(tmp_path / "folder", name)
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    if place == "hf_quant_config.json":
        file = {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"],
        }}  # fmt: skip
        (tmp_path / "folder" / place).write_text(json.dumps(file))
    else:
        config[place] = settings
    path.write_text(json.dumps(config))
    ids = torch.tensor([PROMPT])
    loaded = models.load(tmp_path / "folder", device="cpu")
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_of_its_own_is_used_though_config_ties_it(tmp_path, name):
    """transformers does so with the plain folder."""
    expected = write_quantized(tmp_path / "folder", name)
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    ids = torch.tensor([PROMPT])
    loaded = models.load(tmp_path / "folder", device="cpu")
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("compressed int4", "weight_g_idx", r"another order \(actorder\), as weight_g_idx says"),
        ("gptq", "g_idx", r"another order \(desc_act\), as g_idx says"),
    ],
)
def test_permuted_inputs_are_refused_without_the_setting(tmp_path, name, tensor, text):
    path = "model.layers.1.mlp.down_proj"
    write_quantized(tmp_path / "folder", name)
    file = tmp_path / "folder" / "model.safetensors"
    order = torch.arange(256, dtype=torch.int32).remainder(2)
    save_file(load_file(file) | {f"{path}.{tensor}": order}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=text):
        models.load(tmp_path / "folder", device="cpu")


@pytest.mark.parametrize("name", ["awq", "fp8 blocks"])
def test_files_of_torch_are_read_too(tmp_path, name):
    expected = write_quantized(tmp_path / "folder", name)
    file = tmp_path / "folder" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "folder" / "pytorch_model.bin")
    file.unlink()
    loaded = models.load(tmp_path / "folder", device="cpu")
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_zero_points_may_be_stored_one_by_one(tmp_path):
    """Older versions of compressed-tensors did not pack them."""
    expected = write_quantized(tmp_path / "folder", "compressed int4 asymmetric")
    file = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("zero_point")]:
        bits = torch.arange(8)[:, None] * 4
        numbers = ((tensors[name][:, None] >> bits) & 15).flatten(0, 1)
        tensors[name] = (numbers - 8).to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = models.load(tmp_path / "folder", device="cpu")
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", ["awq", "fp8 blocks"])
def test_the_file_that_config_names_is_read(tmp_path, name, is_sharded):
    expected = write_quantized(tmp_path / "folder", name)
    file = tmp_path / "folder" / "model.safetensors"
    tensors, other = load_file(file), "other.safetensors"
    file.rename(file.with_name(other))
    save_file(tensors | {"model.norm.weight": torch.zeros(128)}, file, metadata={"format": "pt"})
    if is_sharded:
        index = {"weight_map": dict.fromkeys(tensors, other)}
        other += ".index.json"
        (tmp_path / "folder" / other).write_text(json.dumps(index))
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_weights": other}))
    loaded = models.load(tmp_path / "folder", device="cpu")
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(
        loaded.original(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4
    )
    path.write_text(json.dumps(config | {"transformers_weights": "absent.safetensors"}))
    with pytest.raises(CheckpointError, match=r"no 'absent\.safetensors', the transformers_weig"):
        models.load(tmp_path / "folder", device="cpu")


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_biases_that_the_model_does_not_have(tmp_path, name, value):
    """AutoGPTQ writes biases of zeros for all layers."""
    bias = "model.layers.1.mlp.down_proj.bias"
    write_quantized(tmp_path / "folder", name)
    file = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(file) | {bias: torch.full((128,), float(value))}
    save_file(tensors, file, metadata={"format": "pt"})
    if value:
        with pytest.raises(CheckpointError, match=bias):
            models.load(tmp_path / "folder", device="cpu")
    else:
        models.load(tmp_path / "folder", device="cpu")


@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "compressed int4"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_check_at_load_fails_for_wrong_numbers(tmp_path, monkeypatch, name, kind):
    def wrong(*arguments):
        numbers = dequantized(*arguments)
        return numbers.roll(1, -1)

    dequantized = quantized_layout.dequantized
    write_quantized(tmp_path / "folder", name, kind)
    for module in (quantized_layout, quantized_linear, weight):
        monkeypatch.setattr(module, "dequantized", wrong)
    with pytest.raises((ConfigError, CheckpointError), match="Report this"):
        models.load(tmp_path / "folder", device="cpu")


@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "compressed fp8 channel"])
def test_weights_are_held_once(tmp_path, name):
    write_quantized(tmp_path / "folder", name)
    loaded = models.load(tmp_path / "folder", device="cpu")
    assert "one product of" in str(loaded.layout.replaced)
    tensors = [*loaded.model.parameters(), *loaded.original.parameters()]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    needed = sum(each.nbytes for each in loaded.model.parameters())
    assert sum(storage.nbytes() for storage in held.values()) <= 1.01 * needed
    layer, same = (m.model.layers[0].mlp.up_proj for m in (loaded.model, loaded.original))
    layer.scale.mul_(2)
    assert torch.equal(layer.scale, same.scale)


def test_quantised_weights_are_not_quantised_again(tmp_path):
    write_quantized(tmp_path, "awq")
    with pytest.raises(ConfigError, match="the weights are quantised already"):
        models.load(tmp_path, quantize="fp8", device="cpu")
