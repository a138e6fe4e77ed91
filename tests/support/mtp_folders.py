"""Folders of small models with MTP layers, in published layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


def save_with_mtp(model: PreTrainedModel, folder: Path, template: int, count: int = 1) -> None:
    """Save a model and random MTP layers like its layer ``template``.

    The folder of a DeepSeek-V3 or GLM has them behind its layers, others beside them as ``mtp``
    (Qwen3-Next, Qwen3.5).
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    is_behind = model.config.model_type in (
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm_moe_dsa",
    )
    names = behind if is_behind else beside
    (prefix,) = {name.partition("layers.")[0] for name in tensors if "layers." in name}
    stem = f"{prefix}layers.{template}."
    block = {
        name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)
    }
    if model.config.model_type != "qwen3_5_moe_text":  # its experts are stored together
        block = dict(one_by_one(block))
    size = model.config.hidden_size
    generator = torch.Generator().manual_seed(7)
    for layer in range(count):
        parts = {"enorm": (size,), "hnorm": (size,), "norm": (size,), "eh_proj": (size, 2 * size)}
        for name, shape in parts.items():
            tensors[names(model, layer, name)] = torch.randn(shape, generator=generator) * 0.15 + (
                len(shape) == 1 and is_behind
            )
        for name, tensor in block.items():
            noise = torch.randn(tensor.shape, generator=generator) * 0.02
            tensors[names(model, layer, f"block.{name}")] = tensor + noise
    save_file(tensors, file, metadata={"format": "pt"})


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer, those of its experts as they are published, each alone."""
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            if kind == "down_proj":
                yield f"{path}.{expert}.down_proj.weight", weight.clone()
            else:
                for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                    yield f"{path}.{expert}.{part}.weight", half.clone()


def behind(model: PreTrainedModel, layer: int, name: str) -> str:
    """Return the stored name in the layout of DeepSeek-V3 and GLM-4.5."""
    part, _, rest = name.partition(".")
    stem = f"model.layers.{model.config.num_hidden_layers + layer}"
    if part == "block":
        return f"{stem}.{rest}"
    return f"{stem}.{'shared_head.norm' if part == 'norm' else part}.weight"


def beside(_: PreTrainedModel, layer: int, name: str) -> str:
    """Return the stored name in the layout of Qwen3-Next and Qwen3.5."""
    part, _, rest = name.partition(".")
    if part == "block":
        return f"mtp.layers.{layer}.{rest}"
    published = {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    }  # fmt: skip
    return f"mtp.{published.get(part, part)}.weight"
