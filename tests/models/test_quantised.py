"""Quantised folders: those that load run captured, others are refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import graphkit as gk
from graphkit import models
from graphkit.errors import CaptureError, CheckpointError
from small_models import small_model

PROMPT = [5, 17, 3, 17, 3, 17, 9]


def with_quantisation(folder, settings):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.filterwarnings("ignore")  # of torchao, at its import
@pytest.mark.parametrize("activations", [False, True], ids=["weights", "weights and activations"])
def test_int8_of_torchao_runs_captured(tmp_path, activations):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    kind = "Int8DynamicActivationInt8Weight" if activations else "Int8WeightOnly"
    settings = TorchAoConfig(getattr(quantization, f"{kind}Config")())
    small_model("llama").save_pretrained(tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings
    ).save_pretrained(tmp_path / "int8")
    loaded = models.load(tmp_path / "int8", device="cpu")
    projection = loaded.model.model.layers[0].mlp.gate_proj
    assert type(projection.weight) is not nn.Parameter, "quantised"
    assert not any(name.endswith("proj") for name in loaded.layout.replaced)
    assert "model.norm" in loaded.layout.replaced
    with loaded.engine(
        num_steps=3, max_batch_size=2, max_context_len=64, generation="v3"
    ) as engine:
        engine.capture()
        (request,) = engine.generate([PROMPT], gk.SamplingParams(max_new_tokens=8))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    expected = loaded.original.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    assert request.output_ids == expected[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "quanto", "weights": "int8"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},  # a malformed setting
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_a_folder_that_cannot_be_loaded_is_one_line(tmp_path, settings):
    small_model("llama").save_pretrained(tmp_path)
    with_quantisation(tmp_path, settings)
    with pytest.raises(CheckpointError) as caught:
        models.load(tmp_path, device="cpu")
    assert str(caught.value).startswith(f"{tmp_path} cannot be loaded by transformers: ")
    assert "\n" not in str(caught.value)


class ScaledOnTheHost(nn.Module):
    """A linear layer that reads its scale on the host, as some quantised layers do."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter((weight * 127).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(torch.tensor(1 / 127))

    def forward(self, rows):
        return rows @ self.weight.T.to(rows.dtype) * self.scale.item()


def test_a_layer_that_cannot_be_captured_is_named():
    model = small_model("llama")
    model.model.layers[1].mlp.up_proj = ScaledOnTheHost(model.model.layers[1].mlp.up_proj.weight)
    loaded = models.load(model, device="cpu")
    with (
        loaded.engine(max_batch_size=2, max_context_len=64) as engine,
        pytest.raises(CaptureError, match=r"_local_scalar_dense at .*layers\.1\.mlp\.up_proj"),
    ):
        engine.capture()
