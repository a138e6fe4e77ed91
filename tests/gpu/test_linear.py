"""``graphkit.ops.linear`` on CUDA against torch, and in chains of kernels that start early."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from graphkit.models.quantization import Linear
from graphkit.ops.decoder import add_rms_norm, silu_and_mul
from graphkit.ops.kernels.devices import has_dependent_launch, has_warpgroups
from graphkit.ops.kernels.quantized_linear_config import TiledProduct, choose_product
from graphkit.ops.kernels.streamed_plain_config import MOST_PLAIN_ROWS
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.linear import linear
from graphkit.ops.registration import OPS
from sanitized import sanitized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_dependent_launch(torch.device("cuda", 0)),
        reason="needs compute capability 9.0",
    ),
]
CASES = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ops" / "quantized_cases.py"))
CUDA = torch.device("cuda", 0)
SHAPES = ((64, 128), (192, 384), (512, 1024), (1024, 4096))
"""Outputs and inputs, in one part and in several."""


def expected_of(x, weight, bias):
    wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return wide.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 16, 17, 32, 33, 64, 65])
def test_products_match_those_in_float64(rows, dtype):
    for args in CASES["plain_cases"](CUDA, [dtype], [rows], (*SHAPES, (65, 128), (64, 100))):
        CASES["assert_close"](linear(*args), expected_of(*args), args[0].shape[1])


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (1024, 14336), (4096, 14336), (6144, 4096), (28672, 4096)], ids=str
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(shape, gated):
    for x, *others in CASES["plain_cases"](CUDA, [torch.bfloat16], [MOST_PLAIN_ROWS], (shape,)):
        whole = linear(x, *others, gated=gated)
        for rows in (1, 5, 16, 17, 32, 33, 40):
            assert torch.equal(linear(x[:rows], *others, gated=gated), whole[:rows]), rows


PRODUCTS = (
    TiledProduct(64, 16, 1, 4, 4, early_bytes=0), TiledProduct(64, 32, 2, 4, 4, early_bytes=512),
    TiledProduct(64, 64, 4, 4, 3, early_bytes=256), TiledProduct(32, 16, 2, 2, 6, early_bytes=128),
    TiledProduct(128, 64, 2, 8, 3, early_bytes=256),
    *sanitized(TiledProduct(32, 8, 4, 2, 4, 2, 256)),
)  # fmt: skip


@pytest.mark.parametrize("config", PRODUCTS, ids=str)
def test_every_configuration_matches(config):
    op = OPS["linear"]
    for args in CASES["plain_cases"](CUDA, [torch.bfloat16], [7, 50], ((384, 1024), (130, 600))):
        got = op.launch(op.arguments(*args), config)
        CASES["assert_close"](got, expected_of(*args), args[0].shape[1])


STREAMED = [
    StreamedProduct(*each)
    for each in (
        (256, 64, 2, 5, 8), (128, 32, 4, 9, 4), (256, 16, 1, 5, 16), (96, 64, 2, 6, 8),
        (48, 16, 1, 6, 4), (64, 16, 2, 5, 4, 2), (96, 64, 1, 2, 8, 2),
    )
]  # fmt: skip
STREAMED += sanitized(StreamedProduct(64, 16, 1, 6, 4), StreamedProduct(128, 32, 2, 2, 8, 4))
needs_warpgroups = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_warpgroups(torch.device("cuda", 0)),
    reason="needs compute capability 9.0 exactly",
)


@needs_warpgroups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", STREAMED, ids=str)
def test_streamed_weights_match(product, dtype):
    op = OPS["linear"]
    for args in CASES["plain_cases"](CUDA, [dtype], [7, 50, 64], ((768, 1024), (768, 4096))):
        got = op.launch(op.arguments(*args), product)
        CASES["assert_close"](got, expected_of(*args), args[0].shape[1])
        x = args[0] / 16
        gated = op.launch(op.arguments(x, *args[1:], gated=True), product)
        expected = silu_and_mul(expected_of(x, *args[1:]))
        CASES["assert_close"](gated, expected, args[0].shape[1])


@needs_warpgroups
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
def test_a_streamed_product_has_the_same_bits_each_time(shape):
    ((x, weight, _), _) = CASES["plain_cases"](CUDA, [torch.bfloat16], [48], (shape,))
    first = linear(x, weight)
    for _ in range(200):
        assert torch.equal(linear(x, weight), first)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_kernels_that_start_early_read_what_the_ones_before_wrote(rows):
    """A captured chain has the bits of the same chain with the device idle before each kernel."""
    generator = torch.Generator(CUDA).manual_seed(0)
    width = 2048

    def random(*shape):
        return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)

    layers = [
        (random(2 * width, width) / 45, random(width, width) / 45, random(width)) for _ in range(6)
    ]

    def run(x, wait):
        stream = normed = x
        for gate_up, down, norm in layers:
            both = linear(normed, gate_up)
            wait()
            gated = silu_and_mul(both)
            wait()
            out = linear(gated, down)
            wait()
            normed, stream = add_rms_norm(out, stream, norm, 1e-5)
            wait()
        return normed

    x = random(rows, width)
    with torch.no_grad():
        run(x, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(x, lambda: None)
        for _ in range(50):
            x.copy_(random(rows, width))
            graph.replay()
            assert torch.equal(got, run(x, torch.cuda.synchronize))


def test_layers_differentiate_by_torch():
    layer = Linear(128, 64, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(4, 128, device=CUDA, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(64, 128).to(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, MOST_PLAIN_ROWS + 1])
def test_the_number_of_rows_decides(rows):
    chosen = choose_product(rows, 4096, 4096, 16, CUDA, torch.bfloat16)
    assert (chosen is None) == (rows > MOST_PLAIN_ROWS)
