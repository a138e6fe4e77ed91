"""A quantised weight: numbers of few bits, their scales, and how it is made from another weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.functional import pad

from graphkit.errors import ConfigError
from graphkit.ops.quantized_layout import (
    BLOCK,
    SYMMETRIC_ZERO,
    blocks,
    dequantized,
    packed_numbers,
    unpacked_numbers,
)

_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(_FP8).max
_LARGEST_INT4 = 15
_LEAST = 1e-12
"""Smallest magnitude used for a scale, so that zeros do not divide by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight of a linear layer with N outputs and K inputs, as ``quantized_linear`` reads it.

    Attributes:
        numbers: [N, K] float8_e4m3fn; or [N, 128 * ceil(K / 256)] uint8, two numbers of four bits
            per byte.
        scale: [R, C]; R is 1, ceil(N / 128) or N, and C is 1 or ceil(K / 128).
        zero_point: [R, C] uint8, for numbers of four bits; ``None`` for 8.
        in_features: K.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    in_features: int

    @property
    def out_features(self) -> int:
        """Outputs (N)."""
        return len(self.numbers)

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights have in common that ``join`` puts together."""
        return self.numbers.dtype, self.in_features, self.scale.shape[1], self.scale.dtype

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a dtype, [N, K]."""
        return dequantized(self.numbers, self.scale, self.zero_point, self.in_features, dtype)

    def part(self, begin: int, end: int) -> QuantizedWeight:
        """Return the weight of the outputs from ``begin`` to ``end``, as views where possible.

        Scales of blocks are repeated for each output if the outputs begin inside a block.
        """
        scale, rows = self.scale, len(self.scale)
        if rows == self.out_features:
            scale = scale[begin:end]
        elif rows > 1 and begin % BLOCK:
            scale = self._scale_by_output()[begin:end]
        elif rows > 1:
            scale = scale[begin // BLOCK : blocks(end)]
        zero_point = None if self.zero_point is None else self.zero_point[begin:end]
        return replace(self, numbers=self.numbers[begin:end], scale=scale, zero_point=zero_point)

    def input_part(self, begin: int, end: int) -> QuantizedWeight:
        """Return the weight of the inputs from ``begin`` to ``end``, as a copy.

        They begin at a multiple of 128 if there are several scales per output.
        """
        scale, zero_point = self.scale, self.zero_point
        if scale.shape[1] > 1:
            columns = slice(begin // BLOCK, blocks(end))
            scale = scale[:, columns].contiguous()
            zero_point = None if zero_point is None else zero_point[:, columns].contiguous()
        if self.numbers.dtype == torch.uint8:
            numbers = packed_numbers(unpacked_numbers(self.numbers, self.in_features)[:, begin:end])
        else:
            numbers = self.numbers[:, begin:end].contiguous()
        return QuantizedWeight(numbers, scale, zero_point, end - begin)

    @staticmethod
    def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return the weight of all outputs of weights of one ``kind``; see ``join_rows``.

        Weights of one scale, or of blocks that do not align, get scales of each output.
        """
        first, ends = weights[0], accumulate(weight.out_features for weight in weights)
        aligned = all(end % BLOCK == 0 for end in list(ends)[:-1])
        by_block = aligned and all(len(w.scale) == blocks(w.out_features) for w in weights)
        scales = [w.scale if by_block else w._scale_by_output() for w in weights]
        zero_point = None
        if any(w.zero_point is not None for w in weights):
            zero_point = join_rows([w.with_zero_points().zero_point for w in weights])  # type: ignore[misc]
        numbers = join_rows([w.numbers for w in weights])
        return QuantizedWeight(numbers, join_rows(scales), zero_point, first.in_features)

    def with_zero_points(self) -> QuantizedWeight:
        """Return the weight of numbers of four bits with the zero points that it has or implies."""
        if self.zero_point is not None:
            return self
        zeros = torch.full_like(self.scale, SYMMETRIC_ZERO, dtype=torch.uint8)
        return replace(self, zero_point=zeros)

    def _scale_by_output(self) -> torch.Tensor:
        """Return the scales as [N, C]."""
        rows, columns = self.scale.shape
        if rows == self.out_features:
            return self.scale
        if rows == 1:
            return self.scale.expand(self.out_features, columns)
        return self.scale.repeat_interleave(BLOCK, 0)[: self.out_features]


def join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of contiguous tensors as one tensor, without gradients.

    It is a view of their memory if they lie there one behind the other, else a copy.
    """
    tensors = [tensor.detach() for tensor in tensors]  # fixed, whatever is assigned meanwhile
    first, end = tensors[0], tensors[0].storage_offset()
    memory, is_one = first.untyped_storage().data_ptr(), True
    for tensor in tensors:
        is_one &= tensor.untyped_storage().data_ptr() == memory and tensor.is_contiguous()
        is_one &= tensor.storage_offset() == end and tensor.dtype == first.dtype
        end += tensor.numel()
    if is_one:
        shape = sum(map(len, tensors)), *first.shape[1:]
        return first.as_strided(shape, first.stride())
    if first.itemsize > 1:
        return torch.cat(tensors)
    # Bytes, which every device can concatenate.
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(first.dtype)


def quantize_fp8(weight: torch.Tensor) -> QuantizedWeight:
    """Quantise a weight, [N, K], to float8_e4m3fn with a scale of each output.

    The largest number of each output becomes 448.
    """
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=_LEAST) / _LARGEST_FP8
    numbers = (wide / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8)
    return QuantizedWeight(numbers, scale, None, wide.shape[1])


def quantize_int4(weight: torch.Tensor) -> QuantizedWeight:
    """Quantise a weight, [N, K], to numbers of four bits in groups of 128 inputs.

    Each group has a zero point, so that its smallest and its largest number are represented.
    Scales are bfloat16; the numbers are the nearest ones for the rounded scale.
    """
    wide = weight.float()
    outputs, inputs = wide.shape
    groups = pad(wide, (0, blocks(inputs) * BLOCK - inputs)).view(outputs, -1, BLOCK)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / _LARGEST_INT4).clamp(min=_LEAST).to(torch.bfloat16)
    factor = scale.float()[..., None]
    zero = (-low[..., None] / factor).round().clamp(0, _LARGEST_INT4)
    numbers = (groups / factor + zero).round().clamp(0, _LARGEST_INT4).to(torch.uint8)
    packed = packed_numbers(numbers.flatten(1)[:, :inputs])
    return QuantizedWeight(packed, scale, zero[..., 0].to(torch.uint8), inputs)


QUANTIZATIONS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "fp8": quantize_fp8,
    "int4": quantize_int4,
}
"""Formats that weights are quantised to at load, by name."""


def check_quantization(name: object) -> None:
    """Check the name of a format of ``QUANTIZATIONS``.

    Raises:
        ConfigError: There is no such format.
    """
    if not isinstance(name, str) or name not in QUANTIZATIONS:
        formats = " or ".join(map(repr, QUANTIZATIONS))
        raise ConfigError(f"quantize is {name!r}, expected {formats}.", field="quantize")
