"""Draft heads and MTP layers of quantised folders keep their linear layers quantised."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.folders import save_draft_head
from transformers import LlamaConfig, Qwen3Config

from causal_attention import causal_attend, run_head
from graphkit import models
from graphkit.errors import CheckpointError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.load import head_algorithm, head_sources, load_head
from graphkit.models.quantization.linear import QuantizedExperts, QuantizedLinear
from mtp_folders import save_with_mtp
from quantized_folders import LAYOUTS, SIZES, change_settings
from small_models import small_model

HEADS = {
    "EAGLE": (EagleHead, LlamaConfig, {}),
    "EAGLE3": (Eagle3Head, LlamaConfig, {"aux_layers": (0, 1, 2)}),
    "DFLASH": (
        DFlashHead, Qwen3Config, {"target_layer_ids": (0,), "block_size": 4, "mask_token_id": 4},
    ),
}  # fmt: skip


def quantise(folder, layout, is_quantised):
    """Store the matrices of a folder that a function selects in a layout, and the plain ones.

    Returns the dequantised weights by name.
    """
    settings, store = LAYOUTS[layout]
    file = folder / "model.safetensors"
    tensors, dequantised = load_file(file), {}
    for name in [name for name in tensors if name.endswith("weight") and is_quantised(name)]:
        weight = tensors.pop(name)
        parts, dequantised[name] = store(weight)
        path = name.removesuffix(".weight")
        tensors |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    change_settings(folder, settings)
    return dequantised


@pytest.fixture(scope="module")
def sources():
    loaded = models.load(small_model("llama", **SIZES), device="cpu", check=False)
    return head_sources(loaded.model, loaded.layout)


def computed(head):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(128, (9,), generator=generator)
    if isinstance(head, DFlashHead):
        features = torch.randn(9, head.encoder.fc.in_features, generator=generator)
        context = head.context_heads(head.encoder(features), torch.arange(9))
        return run_head(head, ids, torch.arange(9), causal_attend(1, 9)), context
    features = torch.randn(9, 128 * (3 if isinstance(head, Eagle3Head) else 1), generator=generator)
    hidden = run_head(head, ids, features, torch.arange(9), causal_attend(1, 9))
    return hidden, head.logits(hidden)


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed int4", "fp8 blocks", "modelopt"])
@pytest.mark.parametrize("algorithm", HEADS)
@torch.no_grad()
def test_a_head_of_a_quantised_folder_stays_quantised(algorithm, layout, sources, tmp_path):
    """It computes what the head with the dequantised weights computes, fused and not."""
    create, config, options = HEADS[algorithm]
    torch.manual_seed(1)
    sizes = {**SIZES, "vocab_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 64}
    head = create(config(**sizes), sources, **options)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.15)
    save_draft_head(head.requires_grad_(False), tmp_path)
    weights = quantise(tmp_path, layout, lambda name: "norm" not in name)
    state = head.state_dict()
    for name, weight in weights.items():
        state[name].copy_(weight)
    expected = computed(head)
    assert head_algorithm(tmp_path) == algorithm
    loaded = load_head(algorithm, tmp_path, sources)
    for name in weights:
        layer = loaded.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear), name
    assert loaded.dtype == torch.float32
    for _ in ("plain", "fused"):
        torch.testing.assert_close(computed(loaded), expected, rtol=2e-3, atol=2e-3)
        loaded.prepare()


def test_a_head_in_an_unknown_layout_is_refused(sources, tmp_path):
    head = EagleHead(LlamaConfig(**SIZES, vocab_size=128, num_hidden_layers=1), sources)
    save_draft_head(head, tmp_path)
    change_settings(tmp_path, {"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="'bitsandbytes', which graphkit does not read"):
        load_head("EAGLE", tmp_path, sources)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text"])
def test_mtp_layers_of_a_quantised_folder_stay_quantised(kind, tmp_path, caplog):
    save_with_mtp(small_model(kind), tmp_path, template=1, count=2)
    own = ("mtp.", "layers.2.", "layers.3.")
    weights = quantise(
        tmp_path, "compressed fp8 channel",
        lambda name: any(part in name for part in own) and "_proj" in name and "kv_b" not in name,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "graphkit"):
        loaded = models.load(tmp_path, draft="mtp", device="cpu", check=False)
    head = loaded.draft.module
    quantised = {n: m for n, m in head.named_modules() if isinstance(m, QuantizedLinear)}
    experts = [name for name in weights if ".experts." in name]
    assert len(quantised) == len(weights) - len(experts)
    held = [module for module in head.modules() if isinstance(module, QuantizedExperts)]
    assert sum(len(each) for each in held) == len(experts) * 2 // 3  # two of gate and up
    assert "are held in" not in caplog.text
    assert any(text.startswith("one product of") for text in head.layout.replaced.values())
