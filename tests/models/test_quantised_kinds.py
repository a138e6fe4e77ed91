"""Quantised folders of every type beside the plain folder with dequantised weights.

transformers loads the plain folder. ``make models`` runs every listed type in every layout.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphkit import models
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.quantization.linear import QuantizedExperts, QuantizedLinear
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.models.stored_tensors import targets
from mtp_folders import save_with_mtp
from quantized_cases import dequantized_experts
from quantized_folders import LAYOUTS, SIZES, change_settings, fp8, write_quantized
from small_models import KINDS, small_model

ALL = "GRAPHKIT_ALL_MODELS" in os.environ  # `make models`
WITHOUT_LINEAR = ("gpt2",)
"""Types that have other modules in the place of linear layers."""
FEW = [
    ("mixtral", "awq"),  # experts that are merged, under other names
    ("qwen3_moe", "fp8 blocks"),
    ("deepseek_v3", "modelopt"),
    ("gpt_neox", "compressed int4"),  # renamed layers
    ("olmo_hybrid", "gptq"),
    ("qwen3_5_text", "compressed naive"),
    ("deepseek_v32", "fp8 tensor"),  # reads the dtype of a weight
    ("mamba", "compressed fp8 channel"),  # multiplies with a weight itself
    ("zamba2", "fbgemm"),  # layers that share weights
]
IDS = torch.tensor([[5, 17, 3, 17, 3, 17, 9, 40, 41, 8]])


def check_logits(loaded, expected):
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.original(IDS).logits, expected(IDS).logits, rtol=1e-3, atol=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in LAYOUTS] if ALL else FEW
)
def test_logits_are_those_of_the_dequantised_folder(tmp_path, kind, name):
    expected = write_quantized(tmp_path / "folder", name, kind, sizes={})
    loaded = models.load(tmp_path / "folder", device="cpu")
    check_logits(loaded, expected)
    layers = [m for m in loaded.original.modules() if isinstance(m, QuantizedLinear)]
    assert layers or kind in WITHOUT_LINEAR


@pytest.mark.parametrize("name", ["awq", "fp8 blocks"])
def test_experts_of_several_groups_are_merged(tmp_path, name):
    sizes = {**SIZES, "intermediate_size": 384}
    expected = write_quantized(tmp_path / "folder", name, "mixtral", sizes=sizes)
    check_logits(models.load(tmp_path / "folder", device="cpu"), expected)


def held_experts(loaded):
    """The weights of experts that are quantised, and that are not."""
    names = "experts.gate_up_proj", "experts.down_proj"
    quantised = [m for n, m in loaded.model.named_modules() if n.endswith(names)]
    assert all(isinstance(module, QuantizedExperts) for module in quantised)
    return quantised, [n for n, _ in loaded.model.named_parameters() if n.endswith(names)]


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8 blocks", "modelopt"])
def test_experts_are_held_as_they_are_stored(tmp_path, caplog, name):
    expected = write_quantized(tmp_path / "folder", name, "qwen3_moe", sizes={})
    loaded = models.load(tmp_path / "folder", device="cpu")
    check_logits(loaded, expected)
    quantised, plain = held_experts(loaded)
    assert len(quantised) == 2 * loaded.model.config.num_hidden_layers
    assert plain == []
    assert "are held in" not in caplog.text


def test_the_check_at_load_finds_experts_that_are_merged_wrongly(tmp_path, monkeypatch):
    write_quantized(tmp_path / "folder", "fp8 blocks", "qwen3_moe", sizes={})
    join = QuantizedWeight.join
    monkeypatch.setattr(QuantizedWeight, "join", lambda weights: join([*reversed(weights)]))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj\.0 computes other products"):
        models.load(tmp_path / "folder", fuse=False, device="cpu")


@pytest.mark.parametrize("shape", ["tensor", "channel", "block"])
def test_experts_of_one_tensor_are_held_as_they_are_stored(tmp_path, shape):
    model = small_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if ".experts." not in name}
    for name, weights in model.named_parameters():
        if ".experts." in name:
            parts = [fp8(weight, shape, "scale") for weight in weights]
            bits = torch.stack([each["weight"].view(torch.uint8) for each, _ in parts])
            tensors[name] = bits.view(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.stack([each["scale"] for each, _ in parts])
            weights.data = torch.stack([expected for _, expected in parts])
    save_file(tensors, file, metadata={"format": "pt"})
    change_settings(tmp_path, LAYOUTS["fp8 blocks"][0])
    loaded = models.load(tmp_path, device="cpu")
    check_logits(loaded, model)
    assert len(held_experts(loaded)[0]) == 2 * model.config.num_hidden_layers


def as_published_beside_vision(folder):
    """Rename the text model of a folder as one of a model that also sees."""
    file = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.ones(8, 8)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_below_a_language_model_are_read(tmp_path, kind, is_nested):
    expected = write_quantized(tmp_path / "folder", "fp8 blocks", kind, sizes={})
    as_published_beside_vision(tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    text = json.loads(path.read_text())
    settings = {} if is_nested else {"quantization_config": text.pop("quantization_config")}
    config = {"model_type": kind.removesuffix("_text"), "text_config": text, **settings}
    path.write_text(json.dumps(config))
    check_logits(models.load(tmp_path / "folder", device="cpu"), expected)


@pytest.mark.parametrize("shape", ["tensor", "channel", "block"])
def test_experts_that_are_stored_as_one_tensor(tmp_path, shape):
    model = small_model("gpt_oss")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [fp8(weight, shape, "scale") for weight in tensors[name]]
    scale = torch.stack([each["scale"] for each, _ in parts])
    tensors[name] = torch.stack([each["weight"].view(torch.uint8) for each, _ in parts]).view(
        torch.float8_e4m3fn
    )
    tensors[f"{name}_scale"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    change_settings(tmp_path, LAYOUTS["fp8 blocks"][0])
    model.get_parameter(name).data = torch.stack([expected for _, expected in parts])
    check_logits(models.load(tmp_path, device="cpu"), model)


def test_experts_that_transformers_does_not_merge_are_refused(tmp_path):
    """transformers has experts of Llama 4 as one tensor, and no conversion from single ones."""
    small_model("llama4_text").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    path = "model.layers.0.feed_forward.experts"
    for number, weight in enumerate(tensors.pop(f"{path}.down_proj")):
        parts, _ = LAYOUTS["modelopt"][1](weight.T.contiguous())
        tensors |= {f"{path}.{number}.down_proj.{end}": part for end, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    change_settings(tmp_path, LAYOUTS["modelopt"][0])
    with pytest.raises(CheckpointError, match=r"experts\.down_proj, .*experts\.0\.down.*no conv"):
        models.load(tmp_path, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("deepseek_v3", "fp8 blocks"), ("glm4_moe", "modelopt"), ("qwen3_next", "awq")],
)
def test_mtp_layers_are_read_quantised(tmp_path, kind, name):
    """The draft equals that of the folder with dequantised MTP layers."""
    save_with_mtp(small_model(kind), tmp_path, template=1)
    file, stored = tmp_path / "model.safetensors", {}
    tensors = load_file(file)
    state = small_model(kind).state_dict()
    for path, target in targets(small_model(kind), tensors).items():
        is_linear = tensors[path].dim() == 2 and "proj" in path
        if target.name in state or not is_linear:
            continue
        parts, tensors[path] = LAYOUTS[name][1](tensors[path])
        path = path.removesuffix(".weight")
        stored |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    assert stored, "quantised MTP layers"
    save_file(tensors, file, metadata={"format": "pt"})
    plain = models.load(tmp_path, draft="mtp", device="cpu").draft.module
    quantised = {n.rpartition(".")[0] for n in stored}
    kept = {n: t for n, t in tensors.items() if n.removesuffix(".weight") not in quantised}
    save_file(kept | stored, file, metadata={"format": "pt"})
    change_settings(tmp_path, LAYOUTS[name][0])
    read = models.load(tmp_path, draft="mtp", device="cpu").draft.module
    kept = {
        name: layer
        for name, layer in read.named_modules()
        if isinstance(layer, QuantizedLinear | QuantizedExperts)
    }
    assert kept
    weights = dict(plain.named_parameters())
    for name, layer in kept.items():
        if isinstance(layer, QuantizedLinear):
            name, weight = f"{name}.weight", layer.quantized.dequantized(torch.float32)
        else:
            weight = dequantized_experts(layer)
        torch.testing.assert_close(weight, weights[name], msg=name)
    for name, parameter in read.named_parameters():
        if name.rpartition(".")[0] not in kept:
            torch.testing.assert_close(parameter, weights[name], msg=name)
