"""The reference of ``quantized_linear`` against weights dequantised number by number."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit import InputError
from graphkit.ops.quantized_layout import dequantized, packed_numbers
from graphkit.ops.quantized_linear import quantized_linear

CASES = runpy.run_path(str(Path(__file__).with_name("quantized_cases.py")))
CPU = torch.device("cpu")


def value(weight, scale, zero_point, outputs, row, column):
    """Return one number of a quantised weight, from the layout that the docstring states."""
    scale_row = {1: 0, outputs: row}.get(scale.shape[0], row // 128)
    scale_column = column // 128 if scale.shape[1] > 1 else 0
    factor = scale[scale_row, scale_column].item()
    if weight.dtype != torch.uint8:
        return weight[row, column].float().item() * factor
    byte = weight[row, column // 256 * 128 + column % 128].item()
    number = byte & 15 if column % 256 < 128 else byte >> 4
    zero = 8 if zero_point is None else zero_point[scale_row, scale_column].item()
    return (number - zero) * factor


@pytest.mark.slow
def test_weights_are_dequantised_number_by_number():
    for _, weight, scale, zero_point, inputs in CASES["weights"](
        CPU, ((3, 5), (130, 140), (2, 390))
    ):
        outputs = len(weight)
        expected = torch.tensor(
            [
                [value(weight, scale, zero_point, outputs, n, k) for k in range(inputs)]
                for n in range(outputs)
            ]
        )
        got = dequantized(weight, scale, zero_point, inputs, torch.float32)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_those_of_the_dequantised_weight(rows, dtype):
    for x, weight, scale, zero_point, bias in CASES["cases"](CPU, [dtype], [rows]):
        matrix = dequantized(weight, scale, zero_point, x.shape[1], torch.float64)
        expected = x.double() @ matrix.T + (0 if bias is None else bias.double())
        got = quantized_linear(x, weight, scale, zero_point, bias)
        CASES["assert_close"](got, expected.to(dtype), x.shape[1])


@pytest.mark.parametrize(
    ("inputs", "nbytes"), [(1, 128), (128, 128), (200, 128), (256, 128), (300, 256), (640, 384)]
)
def test_numbers_are_packed_and_unpacked(inputs, nbytes):
    numbers = torch.arange(16, dtype=torch.uint8).repeat(3, 40)[:, :inputs]
    packed = packed_numbers(numbers)
    assert packed.shape == (3, nbytes)
    ones = torch.ones(3, 1)
    got = dequantized(packed, ones, torch.zeros(3, 1, dtype=torch.uint8), inputs, torch.float32)
    assert torch.equal(got, numbers.float())


def test_a_byte_has_the_numbers_of_two_blocks_and_8_past_the_inputs():
    numbers = torch.cat([torch.full((2, size), size % 7) for size in (128, 128, 100)], 1)
    packed = packed_numbers(numbers.to(torch.uint8))
    assert packed.unique_consecutive(dim=1).tolist() == [[2 | 2 << 4, 2 | 8 << 4, 8 | 8 << 4]] * 2


FP8, BYTES = torch.zeros(130, 200).to(torch.float8_e4m3fn), torch.zeros(130, 128, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("weight", "scale", "zero_point", "text"),
    [
        (FP8[:, :100], (1, 1), None, "weight is .*expected 200 columns"),
        (BYTES[:, :100], (130, 2), None, "weight is .*expected 128 columns"),
        (FP8, (3, 1), None, "scale is .*expected 1, 2 or 130 rows and 1 or 2 columns"),
        (FP8, (2, 3), None, "scale is .*expected 1, 2 or 130 rows"),
        (BYTES, (1, 1), None, "expected 130 rows, one for each output"),
        (BYTES, (130, 2), (130, 1), r"zero_point is \[130, 1\].*= \[130, 2\]"),
        (FP8, (130, 1), (130, 1), "zero_point is for numbers of four bits"),
    ],
    ids=["fp8 width", "int4 width", "rows", "columns", "one scale", "zeros", "fp8 zeros"],
)
def test_refusals(weight, scale, zero_point, text):
    zeros = None if zero_point is None else torch.zeros(zero_point, dtype=torch.uint8)
    with pytest.raises(InputError, match=text):
        quantized_linear(torch.ones(2, 200), weight, torch.ones(scale), zeros)
