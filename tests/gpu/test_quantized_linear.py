"""Products with quantised weights on CUDA against their reference on the CPU, and captured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.quantized_linear import quantized_linear

pytestmark = pytest.mark.gpu
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "quantized_cases.py"))
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = ((4096, 4096), (1000, 14336))


def on_cpu(args):
    return [None if each is None else each.cpu() for each in args]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 16, 17, 33, 64, 65, 130, 256])
def test_the_kernel_matches_the_reference(rows):
    for args in CASES["cases"](CUDA, DTYPES, [rows]):
        expected = quantized_linear(*on_cpu(args))
        CASES["assert_close"](quantized_linear(*args).cpu(), expected, args[0].shape[1])


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_large_weights_match_the_reference(rows):
    for args in CASES["cases"](CUDA, [torch.bfloat16], [rows], shapes=LARGE):
        expected = quantized_linear(*on_cpu(args))
        CASES["assert_close"](quantized_linear(*args).cpu(), expected, args[0].shape[1])


def test_many_rows_match_up_to_a_rounding_of_the_weight():
    for args in CASES["cases"](CUDA, DTYPES, [300]):
        got, expected = quantized_linear(*args).cpu().double(), quantized_linear(*on_cpu(args))
        error = (got - expected.double()).square().mean().sqrt()
        size = expected.double().square().mean().sqrt()
        eps = max(torch.finfo(args[0].dtype).eps, 2.0**-11)  # cuBLAS may use TF32
        assert error <= 2 * eps * size


def test_a_row_does_not_depend_on_the_rows_beside_it():
    for args in CASES["cases"](CUDA, [torch.bfloat16], [64], shapes=LARGE[:1]):
        x, *others = args
        whole = quantized_linear(x, *others)
        for rows in (1, 5, 33):
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
