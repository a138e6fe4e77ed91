"""Targets of a small Llama with random draft heads, for every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from graphkit.models import TransformersModel
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.draft_model import DraftModel
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import DraftHead
from graphkit.models.heads.load import head_sources
from graphkit.models.heads.mtp import MtpHead, MtpLayer
from graphkit.models.layout import decoder_layers
from graphkit.runners.targets import CaptureTarget
from small_llama import small_llama

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
STEPS = 3
LAYER = LlamaConfig(num_hidden_layers=1, **SIZES)


def drafted_llama(
    kind: str | None = "EAGLE",
    *,
    layers: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = 0.1,
    **options: Any,
) -> TransformersModel:
    """Return a Llama of random weights with a random head.

    Args:
        kind: EAGLE, EAGLE3 or DFLASH; ``None`` for no head.
        layers: Layers of the target.
        device: Where it runs.
        dtype: Data type of the weights.
        std: Deviation of the weights.
        options: Arguments of the head.
    """
    model = small_llama(std=std, device=device, dtype=dtype, num_hidden_layers=layers, **SIZES)
    if kind is None:
        return model
    sources = head_sources(model.model, model.layout)
    head: Any
    if kind == "EAGLE":
        head = EagleHead(LAYER, sources, **options)
    elif kind == "EAGLE3":
        options = {"aux_layers": (0, 1, 2), "draft_vocab_size": 40, **options}
        head = Eagle3Head(LAYER, sources, **options)
        head.d2t.copy_(4 * torch.arange(len(head.d2t)))  # every fifth of the first tokens
    else:
        config = Qwen3Config(num_hidden_layers=2, **SIZES)
        head = DFlashHead(config, sources, **options)
    randomise(head, std).to(device, dtype)
    return with_draft(model, head)


def with_draft(model: TransformersModel, draft: DraftModel) -> TransformersModel:
    """Return a model with a draft model."""
    if isinstance(draft, DraftHead):
        draft.prepare()
    return TransformersModel(model.model, model.original, model.layout, draft=draft)


def mtp_chain(model: TransformersModel, std: float = 0.1, *, fuse: bool = True) -> MtpHead:
    """Return random MTP layers of a model, one for each step."""
    layers = decoder_layers(model.original, model.layout)
    chain = []
    for seed in range(STEPS):
        layer = MtpLayer(model.original, layers, len(layers) - 1)
        own = (layer.block, layer.enorm, layer.hnorm, layer.eh_proj, layer.norm)
        for number, part in enumerate(own):
            randomise(part, std, 10 * seed + number)
        layer.prepare(fuse=fuse)
        chain.append(layer.eval().requires_grad_(False))
    return MtpHead(model.original, chain)


def randomise(module: Any, std: float, seed: int = 1) -> Any:
    """Fill the weights of a module with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        values = torch.empty(parameter.shape).normal_(float(is_norm), std, generator=generator)
        parameter.data.copy_(values)
    return module.eval().requires_grad_(False)


def llama_target(
    model: TransformersModel | None = None,
    *,
    topk: int = 1,
    max_batch_size: int = 3,
    has_chain: bool = True,
) -> CaptureTarget:
    """Return a target with every mode, or without those of a chain."""
    model = model or drafted_llama()
    chain = mtp_chain(model) if has_chain else None
    target = model.target(
        topk=topk, max_batch_size=max_batch_size, max_context_len=128, chain=chain
    )
    return replace(target, name="tiny")
