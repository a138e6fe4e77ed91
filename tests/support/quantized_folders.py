"""Folders of a small Llama with quantised layers, in published layouts, from known numbers.

The packing follows the documentation of each layout number by number, in numpy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from graphkit.models.stored_tensors import targets
from small_models import small_model

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes with groups of 128 inputs, two of them in the down projections."""
FP8 = torch.float8_e4m3fn
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a layer by suffix, and its dequantised weight."""


def words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight numbers of four bits of the last dimension into a word, lowest bits first."""
    rows, count = numbers.shape
    packed = np.zeros((rows, -(-count // 8)), dtype=np.uint32)
    for column in range(count):
        nibble = order.index(column % 8)
        packed[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32).copy())


def rounded(weight: torch.Tensor, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers [N, K], scales [N, C] as float16, and zero points [N, C]."""
    matrix = weight.numpy()
    outputs, inputs = matrix.shape
    groups = matrix.reshape(outputs, -1, group_size(inputs))
    low, high = groups.min(2), groups.max(2)
    if symmetric:
        scale = (np.abs(groups).max(2) / 7).astype(np.float16)
        zero = np.full_like(scale, 8)
    else:
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.clip(np.rint(-low / scale), 1, 15)  # AutoGPTQ stores 0 as -1
    numbers = np.clip(
        np.rint(groups / scale[..., None].astype(np.float32)) + zero[..., None], 0, 15
    )
    return numbers.reshape(outputs, inputs).astype(np.uint8), scale, zero.astype(np.uint8)


def group_size(inputs: int) -> int:
    """Return the inputs of a group: 128, or all if they are no multiple of that."""
    return inputs if inputs % 128 else 128


def restored(numbers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> torch.Tensor:
    size = numbers.shape[1] // scale.shape[1]
    spread = [np.repeat(each.astype(np.float32), size, 1) for each in (scale, zero)]
    return torch.from_numpy((numbers.astype(np.float32) - spread[1]) * spread[0])


def awq(weight: torch.Tensor) -> Stored:
    numbers, scale, zero = rounded(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(numbers.T, order),
        "qzeros": words(zero.T, order),
        "scales": torch.from_numpy(scale.T.copy()),
    }
    return tensors, restored(numbers, scale, zero)


def gptq(weight: torch.Tensor, *, symmetric: bool = False) -> Stored:
    numbers, scale, zero = rounded(weight, symmetric)
    tensors = {
        "qweight": words(numbers).t().contiguous(),
        "qzeros": words(zero.T - 1),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group_size(weight.shape[1]),
    }
    return tensors, restored(numbers, scale, zero)


def compressed_int4(weight: torch.Tensor, *, symmetric: bool = True) -> Stored:
    numbers, scale, zero = rounded(weight, symmetric)
    tensors = {
        "weight_packed": words(numbers),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.T).t().contiguous()
    return tensors, restored(numbers, scale, zero)


def fp8(weight: torch.Tensor, kind: str, scale_name: str) -> Stored:
    outputs, inputs = weight.shape
    rows, columns = {
        "tensor": (outputs, inputs), "channel": (1, inputs), "block": (128, 128),
    }[kind]  # fmt: skip
    scale = torch.empty(-(-outputs // rows), -(-inputs // columns))
    numbers, expected = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            scale[row, column] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scale[row, column]).to(FP8)
            expected[part] = numbers[part].float() * scale[row, column]
    if kind == "tensor":
        scale = scale.view(1)
    return {"weight": numbers, scale_name: scale}, expected


def static_fp8(weight: torch.Tensor) -> Stored:
    """Return a layer with scales of its weight and its activations that are numbers, [] float32."""
    tensors, expected = fp8(weight, "tensor", "weight_scale")
    scales = {"weight_scale": tensors["weight_scale"].view(()), "input_scale": torch.tensor(0.02)}
    return tensors | scales, expected


def _compressed(layout: str, **weights: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def _int4(**others: object) -> dict[str, object]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **others}


def _fp8(**others: object) -> dict[str, object]:
    return {"num_bits": 8, "type": "float", **others}


LAYOUTS: Mapping[str, tuple[dict[str, object], Callable[[torch.Tensor], Stored]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None},
        awq,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False},
        gptq,
    ),
    "gptq symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
         "checkpoint_format": "gptq"},
        lambda weight: gptq(weight, symmetric=True),
    ),
    "compressed int4": (
        _compressed("pack-quantized", **_int4(symmetric=True, actorder=None)), compressed_int4,
    ),
    "compressed int4 asymmetric": (
        _compressed("pack-quantized", **_int4(symmetric=False)),
        lambda weight: compressed_int4(weight, symmetric=False),
    ),
    "compressed fp8 channel": (
        _compressed("float-quantized", **_fp8(strategy="channel")),
        lambda weight: fp8(weight, "channel", "weight_scale"),
    ),
    "compressed fp8 tensor": (
        _compressed("float-quantized", **_fp8(strategy="tensor")),
        lambda weight: fp8(weight, "tensor", "weight_scale"),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
         "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8(weight, "channel", "weight_scale"),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
         "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, "block", "weight_scale_inv"),
    ),
    "fp8 tensor": (  # AutoFP8
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        static_fp8,
    ),
    "compressed naive": (
        _compressed("naive-quantized", **_fp8(strategy="tensor", dynamic=False)), static_fp8,
    ),
    "compressed fp8 block": (
        _compressed("float-quantized", **_fp8(strategy="block", block_structure=[128, 128])),
        lambda weight: fp8(weight, "block", "weight_scale"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
         "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
         "producer": {"name": "modelopt", "version": "0.35.0"}},
        static_fp8,
    ),
}  # fmt: skip
"""``quantization_config`` and the storage of a layer, by name."""


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a model but its output head."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            yield name, layer


def linear_names(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the stored weights of linear layers and of single experts."""
    head, names = model.get_output_embeddings(), []
    for name, (target, is_converted, *_) in targets(model, tensors).items():
        if tensors[name].dim() != 2 or not name.endswith(".weight"):
            continue
        layer = None if is_converted else model.get_submodule(target.rpartition(".")[0])
        if "experts." in name or (type(layer) is nn.Linear and layer is not head):
            names.append(name)
    return names


def write_quantized(
    folder: Path,
    name: str,
    kind: str = "llama",
    *,
    sizes: Mapping[str, object] = SIZES,
    **changes: object,
) -> PreTrainedModel:
    """Write a folder in a layout, and return the same model with dequantised weights.

    transformers loads the latter from a plain folder beside the folder.

    Args:
        folder: Receives the files.
        name: One of ``LAYOUTS``.
        kind: As for ``small_model``.
        sizes: Settings of the configuration, for groups of 128 inputs.
        changes: Further settings.
    """
    model = small_model(kind, **{**sizes, **changes})
    for _, layer in linears(model):
        if layer.bias is not None:
            layer.bias.data.normal_(std=0.5)
    plain = folder.with_name(f"{folder.name}-dequantised")
    model.save_pretrained(plain)
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    settings, store = LAYOUTS[name]
    dequantised = {}
    quantised = dict(tensors)
    for path in (each.removesuffix(".weight") for each in linear_names(model, tensors)):
        weight = tensors[f"{path}.weight"]
        if settings["quant_method"] in ("awq", "gptq") and any(size % 8 for size in weight.shape):
            continue  # eight numbers share a word
        parts, dequantised[f"{path}.weight"] = store(weight)
        del quantised[f"{path}.weight"]
        quantised |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(quantised, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors | dequantised, plain / "model.safetensors", metadata={"format": "pt"})
    change_settings(folder, settings)
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    shutil.rmtree(plain)
    return expected


def change_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Set the ``quantization_config`` of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
