"""Small targets of transformers with random draft models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training.folders import save_draft_head
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from graphkit import models
from graphkit.models.heads import assistant as _assistant  # noqa: F401 - transformers 5.23 needs it
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.load import head_sources
from mtp_folders import save_with_mtp
from small_models import WINDOW, small_model


def two_gemmas(_: Path, device: str = "cpu") -> models.TransformersModel:
    """Load a target, and a draft model of half its width and one layer."""
    target = small_model("gemma3_text", tie_word_embeddings=False)
    draft = small_model(
        "gemma3_text", tie_word_embeddings=False, hidden_size=32, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    return models.load(target, draft=draft, device=device)


def head_config(model: Any) -> LlamaConfig:
    """Return the sizes of a Llama layer of the width of a target."""
    return LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


def with_head(
    kind: str,
    folder: Path,
    create: type[EagleHead | Eagle3Head] = EagleHead,
    device: str = "cpu",
    **options: Any,
) -> models.TransformersModel:
    """Save a random head for a target, and load the target with it."""
    other = models.load(small_model(kind), device="cpu", check=False)
    torch.manual_seed(1)
    head = create(head_config(other.model), head_sources(other.model, other.layout), **options)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    if isinstance(head, Eagle3Head) and head.d2t is not None:
        tokens = torch.randperm(128)[: len(head.d2t)].sort().values
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
    save_draft_head(head, folder)
    return models.load(small_model(kind), draft=folder, device=device)


def eagle3(folder: Path, device: str = "cpu") -> models.TransformersModel:
    """Load a model with experts and an EAGLE-3 head with a reduced vocabulary."""
    options = {"aux_layers": (0, 1, 2), "draft_vocab_size": 96}
    return with_head("qwen3_moe", folder, Eagle3Head, device, **options)


def with_mtp(
    kind: str, folder: Path, device: str = "cpu", count: int = 1
) -> models.TransformersModel:
    """Save a target with random MTP layers like its last layer, and load both."""
    model = small_model(kind)
    save_with_mtp(model, folder, model.config.num_hidden_layers - 1, count)
    return models.load(folder, draft="mtp", device=device)


def gemma4(**changes: Any) -> Any:
    """Return a target whose last two layers read the keys and values of the two before."""
    layers = ["sliding_attention", "full_attention"] * 2
    return small_model(
        "gemma4_text",
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": layers, **changes},
    )


def assistant(kind: str = "gemma4", **changes: Any) -> Any:
    """Return a random assistant of Gemma 4, by default with centroids of its tokens."""
    text = {
        "model_type": f"{kind}_text", "vocab_size": 128, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 128, "pad_token_id": 0, "attention_k_eq_v": True,
    }  # fmt: skip
    if kind == "gemma4":
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    settings = {
        "text_config": text, "backbone_hidden_size": 64, "use_ordered_embeddings": True,
        "num_centroids": 16, "centroid_intermediate_top_k": 4, **changes,
    }  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(f"{kind}_assistant", **settings))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(128))
    return model.eval()


def with_assistant(folder: Path, device: str = "cpu") -> models.TransformersModel:
    """Save a random assistant of Gemma 4, and load a target with it."""
    assistant().save_pretrained(folder)
    return models.load(gemma4(), draft=folder, device=device)


CASES: dict[str, Callable[..., models.TransformersModel]] = {
    "standalone": two_gemmas,
    "eagle": lambda folder, device="cpu": with_head("gemma2", folder, device=device),
    "eagle-recurrent": lambda folder, device="cpu": with_head("qwen3_next", folder, device=device),
    "eagle3": eagle3,
    "mtp-behind": lambda folder, device="cpu": with_mtp("deepseek_v3", folder, device),
    "mtp-beside": lambda folder, device="cpu": with_mtp("qwen3_5_text", folder, device),
    "mtp-chain": lambda folder, device="cpu": with_mtp("deepseek_v3", folder, device, 3),
    "assistant": with_assistant,
}
"""Loads a target with a draft model, from an empty folder and a device."""
