"""Rows of stored weights by the formulas of their layouts, number by number.

The check of a loaded folder compares its layers with these. It shares no code with what it checks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_NIBBLE_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight consecutive outputs in a word of AutoAWQ, in steps of four bits."""


def stored_rows(
    method: str, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> torch.Tensor:
    """Return rows of the dequantised weight of a layer, [R, K] float32.

    Args:
        method: ``quant_method`` of the folder.
        tensors: The stored tensors by suffix, as ``StoredLayout.layers`` names them. Of experts
            that are one tensor, those of one expert.
        rows: Outputs, [R] int64.
    """
    if "weight" in tensors:
        return _fp8(tensors, rows)
    if "weight_packed" in tensors:
        return _compressed(tensors, rows)
    numbers, zeros = [], []
    words, zero_words, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].float()
    inputs = len(words) * (1 if method == "awq" else 8)
    row_of_input = torch.arange(inputs, device=words.device)
    for row in rows.tolist():
        nibble = _NIBBLE_OF_AWQ[row % 8] if method == "awq" else row % 8
        zero = _bits(zero_words[:, row // 8], nibble)
        zeros.append(zero if method == "awq" else (zero + 1) % 16)
        if method == "awq":
            numbers.append(_bits(words[:, row // 8], nibble))
        else:
            numbers.append(_bits(words[row_of_input // 8, row], row_of_input % 8))
    group = row_of_input // 128 if len(scales) > 1 else torch.zeros_like(row_of_input)
    factors = scales[group][:, rows].T
    return (torch.stack(numbers) - torch.stack(zeros)[:, group]) * factors


def _compressed(tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    inputs = int(tensors["weight_shape"][1])
    column = torch.arange(inputs, device=rows.device)
    numbers = _bits(tensors["weight_packed"][rows][:, column // 8], column % 8) - 8
    scales = tensors["weight_scale"].float()
    group = column // 128 if scales.shape[1] > 1 else torch.zeros_like(column)
    zeros = torch.zeros_like(numbers)
    stored = tensors.get("weight_zero_point")
    if stored is not None and stored.dtype == torch.int8:
        zeros = stored[rows].long()[:, group]
    elif stored is not None:
        zeros = (_bits(stored[rows // 8], (rows % 8)[:, None]) - 8)[:, group]
    return (numbers - zeros) * scales[rows][:, group]


def _fp8(tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    weight = tensors["weight"]
    (name,) = [name for name in tensors if name != "weight"]
    scale = tensors[name]
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    outputs, inputs = weight.shape
    if scale.numel() == 1:
        return weight[rows].float() * scale.flatten()[0]
    if scale.numel() == outputs and (scale.dim() < 2 or scale.shape[1] == 1):
        return weight[rows].float() * scale.flatten()[rows][:, None]
    if scale.shape == (1, inputs):  # of experts that are stored transposed
        return weight[rows].float() * scale
    grid = scale.reshape(-(-outputs // 128), -(-inputs // 128))
    column = torch.arange(inputs, device=rows.device)
    return weight[rows].float() * grid[rows // 128][:, column // 128]


def _bits(words: torch.Tensor, nibble: int | torch.Tensor) -> torch.Tensor:
    """Return four bits of words of 32 bits, counted from the lowest."""
    unsigned = words.long() % 2**32
    return unsigned // 16**nibble % 16
