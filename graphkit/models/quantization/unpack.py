"""Tensors of a stored layer as a ``QuantizedWeight``, for each layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.ops.quantized_layout import BLOCK, SYMMETRIC_ZERO, blocks, packed_numbers

Tensors = Mapping[str, torch.Tensor]

FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes of the scales of a weight in FP8. All are factors, whatever their name says."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each four bits of a word, lowest bits first, as AutoAWQ packs them."""
_IN_ORDER = tuple(range(8))


def unpack_fp8(tensors: Tensors) -> QuantizedWeight:
    """Return a weight with one scale, or one of each output or each block of 128 x 128."""
    weight, scale = tensors["weight"], fp8_scale(tensors)
    outputs, inputs = weight.shape
    if scale.dim() == 4:  # ModelOpt writes [R, 1, C, 1] for blocks
        scale = scale[:, 0, :, 0]
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    if scale.dim() > 2:
        raise ValueError(f"the scale has {scale.dim()} dimensions, expected at most 2.")
    if scale.shape[0] not in (1, blocks(outputs), outputs):
        raise ValueError(f"the scale has {len(scale)} rows for {outputs} outputs.")
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
    weight, scale = tensors["weight"], fp8_scale(tensors)
    experts, rows, columns = weight.shape
    if scale.dim() < 3:
        scale = scale.reshape(experts, -1, 1)
    shape = tuple(scale.shape)
    if shape[0] != experts or shape[1] not in (1, blocks(rows), rows):
        raise ValueError(f"the scale has the shape {list(shape)} for {list(weight.shape)}.")
    if shape[2] not in (1, blocks(columns), columns):
        raise ValueError(f"the scale has the shape {list(shape)} for {list(weight.shape)}.")
    return scale


def fp8_scale(tensors: Tensors) -> torch.Tensor:
    """Return the scale of a weight in FP8, float32.

    Raises:
        KeyError: There is none.
    """
    scale = next((tensors[name] for name in FP8_SCALES if name in tensors), None)
    if scale is None:
        raise KeyError("scale")
    if scale.dtype == torch.uint8:  # an exponent, as in float8_e8m0fnu
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def unpack_awq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight outputs of one input: [K, N / 8] int32."""
    numbers = _unpacked(tensors["qweight"], 1, _AWQ_ORDER).t()
    zeros = _unpacked(tensors["qzeros"], 1, _AWQ_ORDER).t()
    return _int4(numbers, tensors["scales"].t(), zeros)


def unpack_gptq(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [K / 8, N] int32; zero points are stored less 1."""
    numbers = _unpacked(tensors["qweight"], 0, _IN_ORDER).t()
    zeros = (_unpacked(tensors["qzeros"], 1, _IN_ORDER).t() + 1) & 15
    scales = tensors["scales"].t()
    _check_order(tensors, "g_idx", numbers.shape[1], scales.shape[1], "desc_act")
    return _int4(numbers, scales, zeros)


def unpack_compressed(tensors: Tensors) -> QuantizedWeight:
    """Words hold eight inputs of one output, [N, ceil(K / 8)] int32, 8 added to each number."""
    outputs, inputs = tensors["weight_shape"].tolist()
    numbers = _unpacked(tensors["weight_packed"], 1, _IN_ORDER)[:outputs, :inputs]
    scales = tensors["weight_scale"]
    _check_order(tensors, "weight_g_idx", inputs, scales.shape[-1], "actorder")
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:  # packed along the outputs
        zeros = _unpacked(zeros, 0, _IN_ORDER)[:outputs]
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
