"""Quantised layers in folders of Hugging Face: AWQ, GPTQ, compressed-tensors, FBGEMM and fine FP8.

A layer is stored as several tensors, whose names are the layer's and a suffix each. AutoAWQ
(``gemm``), AutoGPTQ, the package compressed-tensors (``pack-quantized`` and ``float-quantized``),
and ``FbgemmFp8Config`` and ``FineGrainedFP8Config`` of transformers define the layouts.
Activations are not rounded, whatever the folder says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphkit.config import require_type
from graphkit.errors import CheckpointError
from graphkit.ops.quantized_layout import BLOCK, SYMMETRIC_ZERO, blocks, packed_numbers
from graphkit.quantization.weight import QuantizedWeight

Tensors = Mapping[str, torch.Tensor]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each four bits of a word, lowest bits first, as AutoAWQ packs them."""
_IN_ORDER = tuple(range(8))


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How a folder stores its quantised layers.

    Attributes:
        method: ``quant_method`` of the folder.
        numbers: Suffix of the tensor of numbers. A ``weight`` is quantised if its dtype is FP8.
        suffixes: Suffixes of all tensors that ``unpack`` reads.
        unpack: Returns the weight of a layer from its tensors by suffix.
    """

    method: str
    numbers: str
    suffixes: tuple[str, ...]
    unpack: Callable[[Tensors], QuantizedWeight]

    def layers(self, forms: Mapping[str, tuple[list[int], str]]) -> dict[str, dict[str, str]]:
        """Return the stored names of each quantised layer: by layer, then by suffix.

        Args:
            forms: Shape and dtype, as safetensors names it, of each stored tensor.
        """
        ending = f".{self.numbers}"
        is_fp8 = self.numbers == "weight"
        return {
            path: {
                suffix: f"{path}.{suffix}"
                for suffix in self.suffixes
                if f"{path}.{suffix}" in forms
            }
            for path in (name.removesuffix(ending) for name in forms if name.endswith(ending))
            if not is_fp8 or forms[f"{path}{ending}"][1] == "F8_E4M3"
        }

    def weight(self, path: str, tensors: Tensors) -> QuantizedWeight:
        """Return the weight of a layer.

        Args:
            path: Name of the layer.
            tensors: Its tensors by suffix.

        Raises:
            CheckpointError: A tensor is missing, or does not have the shape of the layout.
        """
        try:
            weight = self.unpack(tensors)
        except KeyError as error:
            raise CheckpointError(
                f"{path} has no {error.args[0]}, which {self.method} needs. Download all weights."
            ) from error
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"the tensors of {path} do not fit the layout of {self.method}: {error}"
            ) from error
        columns = weight.scale.shape[1]
        if columns not in (1, blocks(weight.in_features)):
            raise CheckpointError(
                f"{path} has {columns} groups of {weight.in_features} inputs. graphkit reads "
                f"groups of {BLOCK} inputs, or one."
            )
        return weight


def stored_layout(config: Mapping[str, Any]) -> StoredLayout | None:
    """Return the layout of quantised layers; ``None`` for methods that graphkit does not read.

    Args:
        config: ``config.json`` of the folder.

    Raises:
        CheckpointError: The method is one of those above, with settings that are not supported.
        ConfigError: ``config`` is no mapping.
    """
    require_type("stored_layout", "config", config, Mapping, "a mapping")
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    reader = _METHODS.get(str(settings.get("quant_method", "")))
    return None if reader is None else reader(settings)


def _awq(settings: Mapping[str, Any]) -> StoredLayout:
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    _require("awq", "bits", settings.get("bits", 4), 4)
    _require("awq", "version", version, "gemm")
    _require("awq", "zero_point", settings.get("zero_point", True), True)
    _require("awq", "group_size", settings.get("group_size", BLOCK), BLOCK, -1)
    return StoredLayout("awq", "qweight", ("qweight", "qzeros", "scales"), _unpack_awq)


def _gptq(settings: Mapping[str, Any]) -> StoredLayout:
    _require("gptq", "bits", settings.get("bits"), 4)
    _require("gptq", "desc_act", settings.get("desc_act", False), False)
    _require("gptq", "checkpoint_format", settings.get("checkpoint_format", "gptq"), "gptq")
    _require("gptq", "group_size", settings.get("group_size", BLOCK), BLOCK, -1)
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    return StoredLayout("gptq", "qweight", suffixes, _unpack_gptq)


def _compressed(settings: Mapping[str, Any]) -> StoredLayout:
    name = "compressed-tensors"
    schemes = _schemes(settings.get("config_groups") or {})
    layout = settings.get("format")
    _require(name, "format", layout, "pack-quantized", "float-quantized", "naive-quantized")
    for scheme in schemes or [{}]:
        if layout == "pack-quantized":
            _require(name, "num_bits", scheme.get("num_bits"), 4)
            _require(name, "type", scheme.get("type", "int"), "int")
            _require(name, "strategy", scheme.get("strategy"), "group", "channel")
            _require(name, "group_size", scheme.get("group_size") or -1, BLOCK, -1)
            _require(name, "actorder", scheme.get("actorder"), None, "static", "weight")
        else:
            _require(name, "num_bits", scheme.get("num_bits"), 8)
            _require(name, "type", scheme.get("type"), "float")
            _require(name, "strategy", scheme.get("strategy"), "tensor", "channel", "block")
            if scheme["strategy"] == "block":
                _require(name, "block_structure", scheme.get("block_structure"), [BLOCK, BLOCK])
    if layout == "pack-quantized":
        suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        return StoredLayout(name, "weight_packed", suffixes, _unpack_compressed)
    return _fp8_layout(name, "weight_scale")


def _schemes(groups: Any) -> list[Mapping[str, Any]]:
    """Return the settings of the weights of each group."""
    try:
        return [{**(group.get("weights") or {})} for group in groups.values()]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"config_groups of compressed-tensors is {groups!r}, expected objects by name, each "
            "with an object of weights. Correct config.json."
        ) from error


def _fbgemm(_settings: Mapping[str, Any]) -> StoredLayout:
    return _fp8_layout("fbgemm_fp8", "weight_scale")


def _fine_fp8(settings: Mapping[str, Any]) -> StoredLayout:
    size = settings.get("weight_block_size", [BLOCK, BLOCK])
    _require("fp8", "weight_block_size", size, [BLOCK, BLOCK], None)
    _require("fp8", "fmt", settings.get("fmt", "e4m3"), "e4m3")
    return _fp8_layout("fp8", "weight_scale_inv")


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], StoredLayout]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fine_fp8,
}


def _require(method: str, name: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        raise CheckpointError(
            f"{name} of {method} is {value!r}, and graphkit reads "
            f"{' or '.join(map(repr, allowed))}."
        )


def _fp8_layout(method: str, scale: str) -> StoredLayout:
    return StoredLayout(method, "weight", ("weight", scale), partial(_unpack_fp8, scale_name=scale))


def _unpack_fp8(tensors: Tensors, *, scale_name: str) -> QuantizedWeight:
    """Return a weight whose scales are a factor of each number, whatever their name says."""
    weight, scale = tensors["weight"], tensors[scale_name].float()
    outputs, inputs = weight.shape
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    if scale.dim() > 2:
        raise ValueError(f"{scale_name} has {scale.dim()} dimensions, expected at most 2.")
    if scale.shape[0] not in (1, blocks(outputs), outputs):
        raise ValueError(f"{scale_name} has {len(scale)} rows for {outputs} outputs.")
    return QuantizedWeight(weight.contiguous(), scale.contiguous(), None, inputs)


def _unpack_awq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight outputs of one input: [K, N / 8] int32."""
    numbers = _unpacked(tensors["qweight"], 1, _AWQ_ORDER).t()
    zeros = _unpacked(tensors["qzeros"], 1, _AWQ_ORDER).t()
    return _int4(numbers, tensors["scales"].t(), zeros)


def _unpack_gptq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [K / 8, N] int32; zero points are stored less 1."""
    numbers = _unpacked(tensors["qweight"], 0, _IN_ORDER).t()
    zeros = (_unpacked(tensors["qzeros"], 1, _IN_ORDER).t() + 1) & 15
    scales, inputs = tensors["scales"].t(), numbers.shape[1]
    if "g_idx" in tensors:
        groups = torch.arange(inputs, device=numbers.device) // -(-inputs // scales.shape[1])
        if not torch.equal(tensors["g_idx"].long(), groups):
            raise ValueError("its inputs are in another order (desc_act).")
    return _int4(numbers, scales, zeros)


def _unpack_compressed(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [N, ceil(K / 8)] int32, 8 added to each number."""
    outputs, inputs = tensors["weight_shape"].tolist()
    numbers = _unpacked(tensors["weight_packed"], 1, _IN_ORDER)[:outputs, :inputs]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:  # packed along the outputs
        zeros = _unpacked(zeros, 0, _IN_ORDER)[:outputs]
    return _int4(numbers, tensors["weight_scale"], zeros)


def _int4(
    numbers: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> QuantizedWeight:
    """Return a weight of numbers [N, K], scales and zero points [N, C]."""
    outputs, inputs = numbers.shape
    for name, tensor in (("scales", scale), ("zero points", zero_point)):
        if tensor is not None and tensor.shape != (outputs, scale.shape[1]):
            raise ValueError(f"{name} have the shape {list(tensor.shape)} for {outputs} outputs.")
    if zero_point is not None and bool((zero_point == SYMMETRIC_ZERO).all()):
        zero_point = None  # fewer bytes to read
    return QuantizedWeight(
        packed_numbers(numbers.contiguous()),
        scale.contiguous(),
        None if zero_point is None else zero_point.contiguous(),
        inputs,
    )


def _unpacked(words: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of four bits in words of 32 bits as uint8.

    Args:
        words: [A, B] int32.
        dim: The dimension that the eight numbers of a word extend.
        order: Place of each number among the eight, lowest bits first.
    """
    places = sorted(range(8), key=order.__getitem__)
    shifts = torch.tensor([4 * place for place in places], device=words.device)
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & 15
    return numbers.flatten(dim, dim + 1).to(torch.uint8)
