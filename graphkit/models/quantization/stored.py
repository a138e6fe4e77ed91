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

from graphkit.errors import CheckpointError, short_repr
from graphkit.models.quantization.settings import (
    FLOAT,
    FLOAT_BLOCKS,
    PACKED,
    RULES,
    Rule,
    check_quantization_keys,
    quantization_settings,
)
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


_FP8_SUFFIXES = ("weight", *FP8_SCALES)
_PACKED_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
)  # fmt: skip
_INT4: Mapping[str, StoredLayout] = {
    "awq": StoredLayout("awq", "qweight", ("qweight", "qzeros", "scales"), unpack_awq),
    "gptq": StoredLayout("gptq", "qweight", ("qweight", "qzeros", "scales", "g_idx"), unpack_gptq),
}
"""Layouts of weights that are no matrix of FP8; the others have that of FP8."""


def stored_layout(config: Mapping[str, Any]) -> StoredLayout | None:
    """Return the layout of quantised layers; ``None`` for methods that graphkit does not read.

    Raises:
        CheckpointError: The method is one of those above, with settings that are not supported.
    """
    settings = quantization_settings(config) or {}
    method = str(settings.get("quant_method", ""))
    if method not in RULES:
        return None
    check_quantization_keys(settings)
    for rule in RULES[method]:
        rule.check(method, settings)
    if method == "gptq":
        others = [name for name in settings.get("dynamic") or {} if not str(name).startswith("-:")]
        # A name after -: leaves a layer as it is.
        Rule(("dynamic",), others, ([],)).check(method, {})
    if method == "compressed-tensors" and _is_packed(settings):
        return StoredLayout(method, "weight_packed", _PACKED_SUFFIXES, unpack_compressed)
    return _INT4.get(method, StoredLayout(method, "weight", _FP8_SUFFIXES, unpack_fp8))


def _is_packed(settings: Mapping[str, Any]) -> bool:
    """Check the settings of compressed-tensors; return whether words hold several numbers."""
    name, groups = "compressed-tensors", settings.get("config_groups") or {}
    schemes = _schemes(groups)
    rotations, sparsity = settings.get("transform_config"), settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        sparsity = {"format": sparsity}
    if isinstance(rotations, Mapping) and set(rotations) == {"config_groups"}:
        rotations = rotations["config_groups"]
    formats = {group.get("format") or settings.get("format") for group in groups.values()}
    layout = formats.pop() if len(formats) == 1 else settings.get("format")
    known = ("pack-quantized", "float-quantized", "naive-quantized")
    known += () if groups else ("dense", None)  # type: ignore[assignment]
    facts = {
        "transform_config (rotations)": (rotations or None, (None,)),
        "format of sparsity_config": (sparsity.get("format", "dense"), ("dense",)),
        "format": (layout, known),
    }
    for fact, (value, allowed) in facts.items():
        Rule((fact,), value, allowed).check(name, {})
    is_packed = layout == "pack-quantized"
    for scheme in schemes or ([{}] if is_packed else []):
        rules = PACKED if is_packed else FLOAT
        if not is_packed and scheme.get("strategy") == "block":
            rules = (*rules, FLOAT_BLOCKS)
        for rule in rules:
            rule.check(name, scheme)
    return is_packed


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
