"""Products with quantised weights on CUDA against their reference on the CPU, and captured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels.quantized_linear_config import TiledProduct, choose_product
from graphkit.ops.kernels.streamed_linear_config import FEW_ROWS
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.quantized_layout import packed_numbers
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.registration import OPS
from sanitized import sanitized

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "quantized_cases.py"))
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = ((4096, 4096), (1000, 14336))


def on_cpu(args):
    return [None if each is None else each.cpu() for each in args]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 130, 256])
def test_the_kernel_matches_the_reference(rows):
    for args in CASES["cases"](CUDA, DTYPES, [rows]):
        expected = quantized_linear(*on_cpu(args))
        CASES["assert_close"](quantized_linear(*args).cpu(), expected, args[0].shape[1])


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_large_weights_match_the_reference(rows):
    for args in CASES["cases"](CUDA, [torch.bfloat16], [rows], shapes=LARGE):
        expected = quantized_linear(*on_cpu(args))
        CASES["assert_close"](quantized_linear(*args).cpu(), expected, args[0].shape[1])


@pytest.mark.parametrize("rows", [3, 20, 40])
@pytest.mark.parametrize("inputs", [128, 384, 512, 1000, 4224], ids=str)
def test_gates_and_parts_of_pairs_that_are_not_whole_match_the_reference(inputs, rows):
    for x, *others in CASES["cases"](CUDA, [torch.bfloat16], [rows], shapes=((256, inputs),)):
        args = x / 16, *others
        gated = quantized_linear(*args, gated=True).cpu()
        CASES["assert_close"](gated, quantized_linear(*on_cpu(args), gated=True), inputs)
        parts = quantized_linear(*args, in_parts=True)
        got = parts.sum(0).to(x.dtype).cpu()
        CASES["assert_close"](got, quantized_linear(*on_cpu(args)), inputs)


def test_many_rows_match_up_to_a_rounding_of_the_weight():
    for args in CASES["cases"](CUDA, DTYPES, [300]):
        got, expected = quantized_linear(*args).cpu().double(), quantized_linear(*on_cpu(args))
        error = (got - expected.double()).square().mean().sqrt()
        size = expected.double().square().mean().sqrt()
        eps = max(torch.finfo(args[0].dtype).eps, 2.0**-11)  # cuBLAS may use TF32
        assert error <= 2 * eps * size


def test_a_row_does_not_depend_on_the_rows_beside_it():
    for args in CASES["cases"](CUDA, [torch.bfloat16], [100], shapes=LARGE[:1]):
        x, *others = args
        for most, fewer in ((FEW_ROWS, (1, 5, 17)), (64, (33, 40)), (100, (65, 80))):
            whole = quantized_linear(x[:most], *others)
            for rows in fewer:
                assert torch.equal(quantized_linear(x[:rows], *others), whole[:rows])


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_products_are_captured_without_a_synchronisation(rows):
    for args in CASES["cases"](CUDA, [torch.bfloat16], [rows], shapes=((264, 4096),)):
        x, *others = args
        quantized_linear(*args)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = quantized_linear(*args)
        x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, quantized_linear(x, *others))


STREAMED = [
    StreamedProduct(*each)
    for each in (
        (64, 8, 1, 2), (64, 8, 4, 3), (128, 16, 2, 5), (32, 8, 2, 4, 1),
        (64, 32, 1, 3, 2), (128, 8, 1, 5, 8), (32, 8, 1, 3, 2), (64, 8, 1, 2, 8, 2),
        (64, 32, 1, 2, 16, 4), (128, 16, 2, 3, 16, 2), (32, 8, 1, 3, 8, 4),
        (64, 64, 2, 3), (96, 64, 1, 4, 8),
    )
]  # fmt: skip
STREAMED += sanitized(StreamedProduct(96, 8, 1, 3, 8), StreamedProduct(48, 16, 2, 2, 8, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("result", [{}, {"gated": True}, {"in_parts": True}], ids=str)
@pytest.mark.parametrize("product", STREAMED, ids=str)
def test_streamed_weights_match_the_reference(product, result, dtype):
    op = OPS["quantized_linear"]
    for x, *others in CASES["cases"](CUDA, [dtype], [1, 7, 32, 50], shapes=((768, 1024),)):
        args = x / 16, *others
        got = op.launch(op.arguments(*args, **result), product)
        expected = quantized_linear(*on_cpu(args), **result)
        if "in_parts" in result:
            got, expected = got.sum(0).to(dtype), expected[0]
        CASES["assert_close"](got.cpu(), expected, 1024)


def test_rows_and_weights_that_are_not_aligned_are_copied():
    for x, weight, *others in CASES["cases"](CUDA, [torch.bfloat16], [3], shapes=((64, 512),)):
        assert isinstance(choose_product(3, 512, 64, 8, CUDA, x.dtype), StreamedProduct)
        bytes_ = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=CUDA)
        shifted = bytes_[1:].view(weight.shape).copy_(weight.view(torch.uint8)).view(weight.dtype)
        unaligned = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
        got = quantized_linear(unaligned, shifted, *others)
        assert torch.equal(got, quantized_linear(x, weight, *others))


PRODUCTS = (
    TiledProduct(32, 8, 2, 2, 4, 2), TiledProduct(32, 16, 4, 2, 3, 1, 0),
    TiledProduct(64, 16, 2, 4, 3, 2), TiledProduct(64, 64, 1, 2, 3),
    TiledProduct(128, 64, 2, 8, 3), *sanitized(TiledProduct(16, 8, 1, 1, 4, 2)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", PRODUCTS, ids=str)
def test_every_configuration_matches_the_reference(config, dtype):
    op = OPS["quantized_linear"]
    for args in CASES["cases"](CUDA, [dtype], [7, 33], shapes=((384, 1024), (130, 600))):
        got = op.launch(op.arguments(*args), config).cpu()
        CASES["assert_close"](got, quantized_linear(*on_cpu(args)), args[0].shape[1])


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_are_exact(dtype, rows):
    """A row that selects one input gets its number, bit by bit."""
    one = torch.eye(384, dtype=dtype, device=CUDA)
    codes = torch.arange(384).to(torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    float8 = codes.repeat(64, 1).view(torch.float8_e4m3fn)
    ones = torch.ones(64, 1)
    nibbles = (torch.arange(64)[:, None] + torch.arange(384)).remainder(16).to(torch.uint8)
    zeros = torch.arange(192, dtype=torch.uint8).remainder(16).view(64, 3)
    packed = packed_numbers(nibbles)
    for args in (
        (float8, ones, None),
        (packed, ones.expand(64, 3).contiguous(), zeros),
        (packed, ones.expand(64, 3).contiguous(), None),
    ):
        on_device = [None if each is None else each.to(CUDA) for each in args]
        parts = [quantized_linear(some, *on_device).cpu() for some in one.split(rows)]
        assert torch.equal(torch.cat(parts), quantized_linear(one.cpu(), *args))
