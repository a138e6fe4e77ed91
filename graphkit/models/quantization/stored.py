"""Quantised layers in folders of Hugging Face: AWQ, GPTQ, compressed-tensors, ModelOpt and FP8.

A layer is stored as several tensors, whose names are the layer's and a suffix each. AutoAWQ
(``gemm``), AutoGPTQ, the packages compressed-tensors (``pack-quantized`` and ``float-quantized``)
and ModelOpt (FP8), and ``FbgemmFp8Config`` and ``FineGrainedFP8Config`` of transformers define the
layouts. Activations are not rounded, whatever the folder says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.ops.quantized_layout import BLOCK, SYMMETRIC_ZERO, blocks, packed_numbers

Forms = Mapping[str, tuple[list[int], str]]
Tensors = Mapping[str, torch.Tensor]
Weights = TypeVar("Weights")


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
        weight = self.unpacked(path, tensors, self.unpack)
        columns = weight.scale.shape[1]
        if columns not in (1, blocks(weight.in_features)):
            raise CheckpointError(
                f"{path} has {columns} groups of {weight.in_features} inputs. graphkit reads "
                f"groups of {BLOCK} inputs, or one."
            )
        return weight

    def unpacked(
        self, path: str, tensors: Tensors, unpack: Callable[[Tensors], Weights]
    ) -> Weights:
        """Return what a function makes of the tensors of a layer.

        Raises:
            CheckpointError: As for ``weight``.
        """
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


_FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes of the scales of a weight in FP8. All are factors, whatever their name says."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each four bits of a word, lowest bits first, as AutoAWQ packs them."""
_IN_ORDER = tuple(range(8))


def _unpack_fp8(tensors: Tensors) -> QuantizedWeight:
    """Return a weight with one scale, or one of each output or each block of 128 x 128."""
    weight, scale = tensors["weight"], _fp8_scale(tensors)
    outputs, inputs = weight.shape
    if scale.dim() == 4:  # ModelOpt writes [R, 1, C, 1] for blocks
        scale = scale.squeeze(3).squeeze(1)
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    if scale.shape not in ((1, 1), (outputs, 1), (blocks(outputs), blocks(inputs))):
        raise ValueError(f"the scale has the shape {list(scale.shape)} for {list(weight.shape)}.")
    return QuantizedWeight(weight.contiguous(), scale.contiguous(), None, inputs)


def unpack_fp8_experts(tensors: Tensors) -> torch.Tensor:
    """Return the dequantised weights of experts that are stored as one tensor, [E, A, B] float32.

    The scale is [E], [E, 1, 1], [E, A], [E, A, 1] or [E, 1, B], or has one number per block.
    """
    weight, scale = tensors["weight"], _expert_scale(tensors)
    for dim, size in ((1, weight.shape[1]), (2, weight.shape[2])):
        if scale.shape[dim] == blocks(size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return weight.float() * scale


def quantized_fp8_experts(tensors: Tensors) -> list[QuantizedWeight] | None:
    """Return the weights of experts that are stored as one tensor; ``None`` with scales of inputs.

    The scale is that of ``unpack_fp8_experts``.
    """
    weight, scale = tensors["weight"], _expert_scale(tensors)
    columns = weight.shape[2]
    if scale.shape[2] not in (1, blocks(columns)):
        return None
    return [QuantizedWeight(*each, None, columns) for each in zip(weight, scale, strict=True)]


def _expert_scale(tensors: Tensors) -> torch.Tensor:
    """Return the scale of experts that are stored as one tensor, with three dimensions."""
    weight, scale = tensors["weight"], _fp8_scale(tensors)
    experts, rows, columns = weight.shape
    if scale.dim() < 3:
        scale = scale.reshape(experts, -1, 1)
    of_expert = (1, 1), (rows, 1), (1, columns), (blocks(rows), blocks(columns))
    if scale.shape not in {(experts, *shape) for shape in of_expert}:
        raise ValueError(f"the scale has the shape {list(scale.shape)} for {list(weight.shape)}.")
    return scale


def _fp8_scale(tensors: Tensors) -> torch.Tensor:
    """Return the scale of a weight in FP8, float32.

    Raises:
        KeyError: There is none.
        ValueError: There are several.
    """
    names = [name for name in _FP8_SCALES if name in tensors]
    if not names:
        raise KeyError("scale")
    if len(names) > 1:
        raise ValueError(f"it has several scales: {', '.join(names)}.")
    scale = tensors[names[0]]
    if scale.dtype == torch.uint8:  # an exponent, as in float8_e8m0fnu
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def _unpack_awq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight outputs of one input: [K, N / 8] int32."""
    numbers = _numbers(tensors["qweight"], 1, _AWQ_ORDER).t()
    zeros = _numbers(tensors["qzeros"], 1, _AWQ_ORDER).t()
    return _int4(numbers, tensors["scales"].t(), zeros)


def _unpack_gptq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [K / 8, N] int32; zero points are stored less 1."""
    numbers = _numbers(tensors["qweight"], 0, _IN_ORDER).t()
    zeros = (_numbers(tensors["qzeros"], 1, _IN_ORDER).t() + 1) & 15
    scales = tensors["scales"].t()
    _check_order(tensors, "g_idx", numbers.shape[1], scales.shape[1], "desc_act")
    return _int4(numbers, scales, zeros)


def _unpack_compressed(has_zeros: bool, tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [N, ceil(K / 8)] int32, 8 added to each number."""
    outputs, inputs = tensors["weight_shape"].tolist()
    numbers = _numbers(tensors["weight_packed"], 1, _IN_ORDER)[:outputs, :inputs]
    scales = tensors["weight_scale"]
    _check_order(tensors, "weight_g_idx", inputs, scales.shape[-1], "actorder")
    zeros = tensors["weight_zero_point"] if has_zeros else tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int8:  # one by one, in older folders
        zeros = (zeros + SYMMETRIC_ZERO).to(torch.uint8)
    elif zeros is not None:  # packed along the outputs
        zeros = _numbers(zeros, 0, _IN_ORDER)[:outputs]
    return _int4(numbers, scales, zeros)


def _check_order(tensors: Tensors, name: str, inputs: int, groups: int, setting: str) -> None:
    """Check that groups have inputs that are next to each other.

    Raises:
        ValueError: They do not.
    """
    order = tensors.get(name)
    if order is None or bool((order == -1).all()):  # compressed-tensors writes -1 for no order
        return
    size = BLOCK if groups == blocks(inputs) else -(-inputs // groups)
    expected = torch.arange(inputs, device=order.device) // size
    if not torch.equal(order.long(), expected):
        raise ValueError(
            f"its inputs are in another order ({setting}), as {name} says, and graphkit reads "
            "groups of consecutive inputs."
        )


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


def _numbers(words: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of four bits in words of 32 bits as uint8.

    Args:
        words: [A, B] int32.
        dim: The dimension that the eight numbers of a word extend.
        order: Place of each number among the eight, lowest bits first.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"its words are {words.dtype}, expected torch.int32.")
    places = sorted(range(8), key=order.__getitem__)
    shifts = torch.tensor([4 * place for place in places], device=words.device)
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & 15
    return numbers.flatten(dim, dim + 1).to(torch.uint8)


_FP8_SUFFIXES = ("weight", *_FP8_SCALES)
_PACKED_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
)  # fmt: skip
_INT4: Mapping[str, StoredLayout] = {
    "awq": StoredLayout("awq", "qweight", ("qweight", "qzeros", "scales"), _unpack_awq),
    "gptq": StoredLayout("gptq", "qweight", ("qweight", "qzeros", "scales", "g_idx"), _unpack_gptq),
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
        schemes = _schemes(settings.get("config_groups") or {})
        has_zeros = bool(schemes) and all(each.get("symmetric") is False for each in schemes)
        unpack = partial(_unpack_compressed, has_zeros)
        return StoredLayout(method, "weight_packed", _PACKED_SUFFIXES, unpack)
    return _INT4.get(method, StoredLayout(method, "weight", _FP8_SUFFIXES, _unpack_fp8))


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
            "name, each with an object of weights. Correct config.json."
        ) from error
