"""Quantised layers in folders of Hugging Face: AWQ, GPTQ, compressed-tensors, ModelOpt and FP8.

A layer is stored as several tensors, whose names are the layer's and a suffix each. AutoAWQ
(``gemm``), AutoGPTQ, the packages compressed-tensors (``pack-quantized`` and ``float-quantized``)
and ModelOpt (FP8), and ``FbgemmFp8Config`` and ``FineGrainedFP8Config`` of transformers define the
layouts. Activations are not rounded, whatever the folder says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.config import require_type
from graphkit.errors import CheckpointError, short_repr
from graphkit.models.quantization.settings import check_quantization_keys, quantization_settings
from graphkit.models.quantization.unpack import (
    FP8_SCALES,
    Tensors,
    quantized_fp8_experts,
    unpack_awq,
    unpack_compressed,
    unpack_fp8,
    unpack_fp8_experts,
    unpack_gptq,
)
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.ops.quantized_layout import BLOCK, blocks

Forms = Mapping[str, tuple[list[int], str]]


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

    def layers(self, forms: Forms) -> dict[str, dict[str, str]]:
        """Return the stored names of each quantised layer: by layer, then by suffix.

        The layer of experts that are stored as one tensor has the name of that tensor.

        Args:
            forms: Shape and dtype, as safetensors names it, of each stored tensor.
        """
        ending, layers = f".{self.numbers}", dict[str, dict[str, str]]()
        for name, (shape, dtype) in forms.items():
            if self.numbers == "weight" and dtype != "F8_E4M3":
                continue
            if name.endswith(ending):
                path, names = name.removesuffix(ending), {s: f".{s}" for s in self.suffixes}
            elif self.numbers == "weight" and len(shape) == 3:
                path = name  # its scales are gate_up_proj_scale, say
                names = {s: s.removeprefix("weight") for s in self.suffixes if s != "scale"}
            else:
                continue
            layers[path] = {
                s: f"{path}{end}" for s, end in names.items() if f"{path}{end}" in forms
            }
        return layers

    def shape(self, names: Mapping[str, str], forms: Forms) -> list[int]:
        """Return the shape of the dequantised weight of a layer; ``names`` has those by suffix."""
        shape = forms[names[self.numbers]][0]
        if self.numbers == "weight":
            return shape
        if self.method == "awq":
            return [shape[1] * 8, shape[0]]
        return [shape[1], shape[0] * 8] if self.method == "gptq" else [shape[0], shape[1] * 8]

    def weight(self, path: str, tensors: Tensors) -> QuantizedWeight:
        """Return the weight of a layer.

        Args:
            path: Name of the layer.
            tensors: Its tensors by suffix.

        Raises:
            CheckpointError: A tensor is missing, or does not have the shape of the layout.
        """
        weight: QuantizedWeight = self._unpacked(path, tensors, self.unpack)
        columns = weight.scale.shape[1]
        if columns not in (1, blocks(weight.in_features)):
            raise CheckpointError(
                f"{path} has {columns} groups of {weight.in_features} inputs. graphkit reads "
                f"groups of {BLOCK} inputs, or one."
            )
        return weight

    def experts(self, path: str, tensors: Tensors) -> torch.Tensor:
        """Return the dequantised weights of experts that are one tensor, [E, A, B] float32.

        Args:
            path: Name of the tensor.
            tensors: Its tensors by suffix.

        Raises:
            CheckpointError: As for ``weight``.
        """
        weights: torch.Tensor = self._unpacked(path, tensors, unpack_fp8_experts)
        return weights

    def expert_weights(self, path: str, tensors: Tensors) -> list[QuantizedWeight] | None:
        """Return the weights of experts that are one tensor; ``None`` with scales of inputs.

        The arguments and errors are those of ``experts``.
        """
        weights: list[QuantizedWeight] | None
        weights = self._unpacked(path, tensors, quantized_fp8_experts)
        return weights

    def _unpacked(self, path: str, tensors: Tensors, unpack: Callable[[Tensors], Any]) -> Any:
        try:
            return unpack(tensors)
        except KeyError as error:
            raise CheckpointError(
                f"{path} has no {error.args[0]}, which {self.method} needs. Download all weights."
            ) from error
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"the tensors of {path} do not fit the layout of {self.method}: {error}"
            ) from error


def stored_layout(config: Mapping[str, Any]) -> StoredLayout | None:
    """Return the layout of quantised layers; ``None`` for methods that graphkit does not read.

    Args:
        config: ``config.json`` of the folder.

    Raises:
        CheckpointError: The method is one of those above, with settings that are not supported.
        ConfigError: ``config`` is no mapping.
    """
    require_type("stored_layout", "config", config, Mapping, "a mapping")
    settings = quantization_settings(config)
    reader = None if settings is None else _METHODS.get(str(settings.get("quant_method", "")))
    if settings is None or reader is None:
        return None
    check_quantization_keys(settings)
    return reader(settings)


def _awq(settings: Mapping[str, Any]) -> StoredLayout:
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    _require("awq", "bits", settings.get("bits", settings.get("w_bit", 4)), 4)
    _require("awq", "version", version, "gemm")
    _require("awq", "zero_point", settings.get("zero_point", True), True)
    _require("awq", "desc_act", settings.get("desc_act", False), False)
    size = settings.get("group_size", settings.get("q_group_size", BLOCK))
    _require("awq", "group_size", size, BLOCK, -1)
    return StoredLayout("awq", "qweight", ("qweight", "qzeros", "scales"), unpack_awq)


def _gptq(settings: Mapping[str, Any]) -> StoredLayout:
    _require("gptq", "bits", settings.get("bits"), 4)
    _require("gptq", "desc_act", settings.get("desc_act", False), False)
    for name in ("checkpoint_format", "format"):
        _require("gptq", name, settings.get(name, "gptq"), "gptq", None)
    _require("gptq", "group_size", settings.get("group_size", BLOCK), BLOCK, -1)
    _require("gptq", "data_type", settings.get("data_type", "int"), "int", None)
    _require("gptq", "pack_dtype", settings.get("pack_dtype", "int32"), "int32", None)
    _require("gptq", "is_marlin_format", settings.get("is_marlin_format", False), False)
    others = [name for name in settings.get("dynamic") or {} if not str(name).startswith("-:")]
    _require("gptq", "dynamic", others, [])  # a name after -: leaves a layer as it is
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    return StoredLayout("gptq", "qweight", suffixes, unpack_gptq)


def _compressed(settings: Mapping[str, Any]) -> StoredLayout:
    name = "compressed-tensors"
    groups = settings.get("config_groups") or {}
    schemes = _schemes(groups)
    rotations, sparsity = settings.get("transform_config"), settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        sparsity = {"format": sparsity}
    if isinstance(rotations, Mapping) and set(rotations) == {"config_groups"}:
        rotations = rotations["config_groups"]
    _require(name, "transform_config (rotations)", rotations or None, None)
    _require(name, "format of sparsity_config", sparsity.get("format", "dense"), "dense")
    formats = {group.get("format") or settings.get("format") for group in groups.values()}
    layout = formats.pop() if len(formats) == 1 else settings.get("format")
    known = ("pack-quantized", "float-quantized", "naive-quantized")
    _require(name, "format", layout, *known, *(() if groups else ("dense", None)))
    for scheme in schemes or ([{}] if layout == "pack-quantized" else []):
        _require(name, "dynamic", scheme.get("dynamic", False), False, None)
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
        suffixes = (
            "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
        )  # fmt: skip
        return StoredLayout(name, "weight_packed", suffixes, unpack_compressed)
    return _fp8_layout(name)


def _schemes(groups: Any) -> list[Mapping[str, Any]]:
    """Return the settings of the weights of each group that has any."""
    try:
        return [{**group["weights"]} for group in groups.values() if group.get("weights")]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"config_groups of compressed-tensors is {short_repr(groups)}, expected objects by "
            "name, each "
            "with an object of weights. Correct config.json."
        ) from error


def _fbgemm(_settings: Mapping[str, Any]) -> StoredLayout:
    return _fp8_layout("fbgemm_fp8")


def _fine_fp8(settings: Mapping[str, Any]) -> StoredLayout:
    size = settings.get("weight_block_size", [BLOCK, BLOCK])
    _require("fp8", "weight_block_size", size, [BLOCK, BLOCK], None)
    _require("fp8", "fmt", settings.get("fmt", "e4m3"), "e4m3", "float8_e4m3fn")
    _require("fp8", "scale_fmt", settings.get("scale_fmt", "float"), "float", "ue8m0", None)
    _require("fp8", "expert_dtype", settings.get("expert_dtype", "fp8"), "fp8", None)
    return _fp8_layout("fp8")


def _modelopt(settings: Mapping[str, Any]) -> StoredLayout:
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", None)
    _require("modelopt", "quant_algo", settings.get("quant_algo"), *algorithms)
    return _fp8_layout("modelopt")


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], StoredLayout]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fine_fp8,
    "modelopt": _modelopt,
}


def _require(method: str, name: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        raise CheckpointError(
            f"{name} of {method} is {short_repr(value)}, and graphkit reads "
            f"{' or '.join(map(repr, allowed))}."
        )


def _fp8_layout(method: str) -> StoredLayout:
    return StoredLayout(method, "weight", ("weight", *FP8_SCALES), unpack_fp8)
