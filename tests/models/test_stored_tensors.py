"""Each tensor of a folder is used, or named: in a refusal, or in one line if no text needs it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphkit import models
from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights
from mtp_folders import save_with_mtp
from small_models import small_model

ATTENTION = "model.layers.1.self_attn"
FP8 = torch.float8_e4m3fn


def change(folder, tensors, config=None, kind="llama"):
    """Write the folder of a small model with other tensors (``None`` removes one) and settings."""
    small_model(kind).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    stored |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name in [name for name, tensor in tensors.items() if tensor is None]:
        del stored[name]
    save_file(stored, file, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{ATTENTION}.q_proj.bias": torch.ones(64)},
        {f"{ATTENTION}.q_norm.weight": torch.ones(16)},
        {f"{ATTENTION}.q_proj.lora_A.weight": torch.ones(4, 64)},
        {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(96, 4)},
        {f"{ATTENTION}.o_proj.weight_scale": torch.ones(1)},
        {f"{ATTENTION}.sinks": torch.ones(4)},
        {"model.embed_positions.weight": torch.ones(128, 64)},
    ],
    ids=lambda tensors: next(iter(tensors)).split("layers.")[-1],
)
def test_tensors_that_the_model_does_not_have_are_refused(tmp_path, tensors):
    change(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=next(iter(tensors)).replace(".", r"\.")) as caught:
        models.load(tmp_path, device="cpu")
    assert "does not use" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("has_scale", [False, True])
def test_numbers_without_a_known_scale_are_refused(tmp_path, dtype, has_scale):
    name = f"{ATTENTION}.o_proj.weight"
    tensors = {name: torch.ones(64, 64).to(dtype)}
    if has_scale:
        tensors[f"{name}_scale"] = torch.ones(64, 1)
    change(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is stored as .*scale"):
        models.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({f"{ATTENTION}.q_proj.bias": torch.zeros(64)}, {}),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {}),
        (
            {"model.vision_tower.patch_embed.weight": torch.ones(8)},
            {"vision_config": {"model_type": "siglip_vision_model"}},
        ),
        ({"model.encoder.layers.0.fc1.weight": torch.ones(8)}, {"is_encoder_decoder": True}),
        ({"model.mtp_block.0.mlp.up_proj.weight": torch.ones(8)}, {}),
        ({"v_head.summary.weight": torch.ones(8)}, {}),
        ({f"{ATTENTION}.attn.bias": torch.ones(1, 1, 8, 8).bool()}, {}),
    ],
    ids=["zeros", "frequencies", "vision", "encoder", "mtp", "value head", "mask"],
)
def test_tensors_that_no_text_needs_are_named_once(tmp_path, caplog, tensors, config):
    change(tmp_path, tensors, config)
    with caplog.at_level(logging.INFO, logger="graphkit"):
        models.load(tmp_path, device="cpu")
    lines = [each.message for each in caplog.records if "does not depend on" in each.message]
    assert len(lines) == 1
    assert next(iter(tensors)) in lines[0]


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_mtp_layers_are_named_once(tmp_path, caplog, kind):
    save_with_mtp(small_model(kind), tmp_path, template=1)
    with caplog.at_level(logging.INFO, logger="graphkit"):
        models.load(tmp_path, device="cpu")
    assert len([each for each in caplog.records if "does not depend on" in each.message]) == 1


def test_surplus_layers_are_a_warning(tmp_path, caplog):
    change(tmp_path, {}, {"num_hidden_layers": 1})
    with caplog.at_level(logging.WARNING, logger="graphkit"):
        models.load(tmp_path, device="cpu")
    assert "weights of model.layers.1" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_a_tensor_of_two_files_is_refused_if_they_differ(tmp_path, dtype):
    """A file of an earlier download may be among the shards."""
    change(tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, tmp_path / "a.safetensors")
    for factor in (1, 2):
        norm = (factor * tensors["model.norm.weight"].float()).to(dtype)
        save_file({"model.norm.weight": norm}, tmp_path / "b.safetensors")
        if factor == 1:
            StoredWeights(tmp_path)
    with pytest.raises(CheckpointError, match=r"norm\.weight has other numbers in a\.safe"):
        models.load(tmp_path, device="cpu")


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    change(tmp_path, {})
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"adapter_config\.json.*[Mm]erge"):
        models.load(tmp_path, device="cpu")
