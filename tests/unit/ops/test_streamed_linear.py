"""Kernels in Gluon against the reference, on the CPU by ``gluon_interpreter``."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import triton

from gluon_interpreter import run_kernel
from graphkit.ops.kernels.quantized_numbers import nibble_ptx
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.linear import linear
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.registration import OPS

CPU = torch.device("cpu")
CASES = runpy.run_path(str(Path(__file__).with_name("quantized_cases.py")))


def nibbles(loaded, offset, x, ptx):
    """Return what ``_nibbles`` does by PTX."""
    dtype = x.tensor.dtype
    is_high = ptx in [nibble_ptx(dtype, pack, has_zeros=offset is not None)[1] for pack in (2, 4)]
    number = (loaded >> 4 if is_high else loaded & 15).to(torch.float32)
    units = 64 if dtype == torch.bfloat16 else 512
    offset = -8 / units if offset is None else offset.to(torch.float32)
    return (number / units + offset).to(dtype)


@pytest.fixture
def interpreted(monkeypatch):
    def run(kernel, *args, grid, **options):
        run_kernel(kernel, grid, args, {"_nibbles": nibbles})

    monkeypatch.setattr(triton.JITFunction, "run", run)


STREAMED = [
    StreamedProduct(*each)
    for each in (
        (64, 8, 1, 2), (64, 8, 4, 3), (128, 16, 2, 5), (64, 32, 1, 3, 2), (64, 8, 1, 2, 4, 2),
        (64, 16, 2, 2, 8, 2), (64, 8, 1, 2, 16, 4),
        (96, 8, 1, 3), (48, 8, 2, 2, 4, 2), (64, 64, 2, 3), (96, 64, 1, 4, 8), (48, 64, 1, 2),
    )
]  # fmt: skip
CALLS = [
    (product, result)
    for product in STREAMED
    for result in ({"in_parts": True}, {"gated": True})
    if product.splits == 1 or "in_parts" in result  # another kernel gates the sum of parts
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("product", "result"), CALLS, ids=str)
def test_streamed_weights_match_the_reference(product, result, dtype, interpreted):
    op = OPS["quantized_linear"]
    for x, *others in CASES["cases"](CPU, [dtype], [7], shapes=((768, 1024),)):
        args = x / 16, *others
        got = op.launch(op.arguments(*args, **result), product)
        expected = quantized_linear(*args, **result)
        if "in_parts" in result:
            got, expected = got.sum(0).to(dtype), expected[0]
        CASES["assert_close"](got, expected, 1024)


PLAIN = [
    StreamedProduct(*each)
    for each in (
        (64, 16, 1, 3, 4), (256, 64, 4, 9, 8), (128, 32, 2, 5, 4), (96, 64, 1, 4, 8),
        (64, 16, 1, 2, 4, 2), (96, 64, 2, 3, 8, 2), (128, 16, 1, 2, 4, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("product", PLAIN, ids=str)
def test_streamed_weights_of_16_bits_match_the_reference(product, interpreted):
    op = OPS["linear"]
    results = [{"in_parts": True}] + [{"gated": True}] * (product.splits == 1)
    for result in results:
        for x, *others in CASES["plain_cases"](CPU, [torch.bfloat16], [7], [(768, 1024)]):
            args = x / 16, *others
            got = op.launch(op.arguments(*args, **result), product)
            expected = linear(*args, **result)
            if "in_parts" in result:
                got, expected = got.sum(0).to(x.dtype), expected[0]
            CASES["assert_close"](got, expected, 1024)
