"""``linear`` and ``project`` on every device, beside ``torch.nn.functional.linear``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import quantized_cases as cases
from graphkit import InputError
from graphkit.models.quantization.linear import Linear
from graphkit.ops import linear as module
from graphkit.ops.decoder import add_rms_norm, silu_and_mul
from graphkit.ops.kernels import (
    decoder,
    linear as linear_kernels,
    quantized_linear as kernels,
    tiled_linear,
)
from graphkit.ops.kernels.devices import has_dependent_launch, has_warpgroups
from graphkit.ops.kernels.quantized_linear_config import TiledProduct
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.linear import linear, project
from graphkit.ops.registration import OPS
from op_devices import INTERPRETER, by
from sanitized import sanitized

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 4, 72])
def test_products_of_whole_tiles_have_the_bits_of_torch(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 40), (24, 40), (24,))
    )
    for args in ((x, weight), (x, weight, bias)):
        assert torch.equal(linear(*args), functional.linear(*args))


def test_results_may_be_gated_or_in_parts():
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    whole = functional.linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, swiglu=True), silu_and_mul(whole))
    assert torch.equal(linear(x, weight, bias, split_k_partials=True), whole[None])
    layer, rows = Linear(8, 6), torch.randn(2, 3, 8)
    gate, up = layer(rows).chunk(2, -1)
    torch.testing.assert_close(layer(rows, swiglu=True), functional.silu(gate) * up)
    assert torch.equal(layer(rows, split_k_partials=True), layer(rows)[None])


@pytest.mark.parametrize("result", [{}, {"swiglu": True}, {"split_k_partials": True}], ids=str)
def test_the_schema_and_the_fake_are_those_of_the_op(result):
    """With sizes for which the kernels would split the inputs."""
    x, weight = torch.randn(3, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.graphkit.linear.default
    torch.library.opcheck(op, (x, weight), result, test_utils=checks)


def test_gradients_are_those_of_torch():
    def gradients(function):
        generator = torch.Generator().manual_seed(1)
        args = [
            torch.randn(shape, generator=generator).requires_grad_()
            for shape in ((3, 8), (5, 8), (5,))
        ]
        function(*args).square().sum().backward()
        return [each.grad for each in args]

    for got, expected in zip(gradients(linear), gradients(functional.linear), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "text"),
    [
        ((2, 8), (4, 7), None, r"weight is \[4, 7\].*= \[4, 8\]"),
        ((2, 8), (4, 8), (3,), r"bias is \[3\].*= \[4\]"),
        ((1, 2, 8), (4, 8), None, r"x is \[1, 2, 8\].*expected \[T, K >= 1\]"),
    ],
    ids=["inputs", "bias", "dimensions"],
)
def test_refusals(x, weight, bias, text):
    with pytest.raises(InputError, match=text):
        linear(torch.ones(x), torch.ones(weight), None if bias is None else torch.ones(bias))


def test_a_gate_needs_whole_sums_of_two_halves():
    x, weight = torch.ones(2, 8), torch.ones(5, 8)
    with pytest.raises(InputError, match=r"weight is \[5, 8\].*an even number of rows"):
        linear(x, weight, swiglu=True)
    with pytest.raises(InputError, match="swiglu and split_k_partials are both True"):
        linear(x, weight[:4], swiglu=True, split_k_partials=True)


def test_dtypes_must_be_equal():
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(InputError, match=r"weight is .* bfloat16.* x\.dtype = float32"):
        linear(x, weight.bfloat16())
    with pytest.raises(InputError, match=r"bias is .* float64.* x\.dtype = float32"):
        linear(x, weight, torch.ones(4, dtype=torch.float64))


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says that it is on CUDA."""

    is_cuda = True


def test_layers_call_the_op_on_cuda_without_gradients(monkeypatch):
    called = []

    def note(x, *args):
        called.append(x.shape)
        return linear(x, *args)

    monkeypatch.setattr(module, "linear", note)
    layer, rows = Linear(8, 4).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    expected = functional.linear(rows, layer.weight, layer.bias)
    with torch.no_grad():
        assert torch.equal(layer(rows), expected)
        assert not called
        assert torch.equal(layer(rows.as_subclass(OnCuda)), expected)
        assert called == [(6, 8)]
        with pytest.raises(RuntimeError, match="dtype"):  # as torch: the op is not called
            project(rows.half().as_subclass(OnCuda), layer.weight)
        assert torch.equal(layer(rows.as_subclass(OnCuda), split_k_partials=True), expected[None])
        assert called.pop() == (6, 8)
    assert layer(rows.as_subclass(OnCuda)).requires_grad
    assert len(called) == 1


def test_state_and_class_are_those_of_torch():
    layer, plain = Linear(8, 4), torch.nn.Linear(8, 4)
    plain.load_state_dict(layer.state_dict())
    rows = torch.randn(3, 8)
    assert isinstance(layer, torch.nn.Linear)
    assert torch.equal(layer(rows), plain(rows))


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that are launched."""
    names = []
    launch = kernels.launch

    def note(kernel, *args, **options):
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(kernels, "launch", note)
    monkeypatch.setattr(tiled_linear, "launch", note)
    monkeypatch.setattr(decoder, "launch", note)
    return names


@by(INTERPRETER)
@pytest.mark.parametrize("shape", [(128, 384), (64, 1024)], ids=["whole", "split"])
def test_parts_are_left_to_the_next_kernel(run, shape, launched):
    for args in cases.plain_cases(CPU, [torch.float16], [3], [shape]):
        launched.clear()
        parts = run(linear, *args, split_k_partials=True)
        assert launched == ["linear_kernel"]
        assert parts.dtype == (torch.float16 if len(parts) == 1 else torch.float32)
        assert len(parts) == 1 or shape[1] == 1024
        cases.assert_close(parts.sum(0).half(), linear(*args), shape[1])


@by(INTERPRETER)
@pytest.mark.parametrize(
    ("shape", "names"),
    [((128, 384), ["linear_kernel"]), ((64, 1024), ["linear_kernel", "sum_parts_kernel"])],
    ids=["whole", "split"],
)
def test_weights_of_16_bits_match_the_reference(run, shape, names, launched):
    for args in cases.plain_cases(CPU, [torch.float16], (0, 1, 3, 40), [shape]):
        launched.clear()
        cases.assert_close(run(linear, *args), linear(*args), shape[1])
        assert launched == names


@by(INTERPRETER)
def test_weights_of_any_size_match_the_reference(run, launched):
    half = torch.float16
    for dtype, count, shape in (
        (torch.float32, 3, (64, 128)), (torch.float32, 70, (40, 1100)), (half, 3, (65, 128)),
        (half, 3, (64, 130)), (half, 70, (8, 1100)),
    ):  # fmt: skip
        for args in cases.plain_cases(CPU, [dtype], [count], [shape]):
            cases.assert_close(run(linear, *args), linear(*args), shape[1])
    assert set(launched) == {"linear_kernel", "sum_parts_kernel"}
    launched.clear()
    for args in cases.plain_cases(CPU, [torch.float64], [3], [(64, 128)]):
        assert torch.equal(run(linear, *args), linear(*args))
    x, weight = torch.ones(2, 128, dtype=half), torch.ones(128, 64, dtype=half).t()
    assert torch.equal(run(linear, x, weight), linear(x, weight))
    assert not launched


@by(INTERPRETER)
@pytest.mark.parametrize("result", [{}, {"swiglu": True}, {"split_k_partials": True}], ids=str)
def test_a_prompt_is_one_product_of_torch_where_rows_may_have_other_bits(
    run, result, launched, monkeypatch
):
    monkeypatch.setattr(linear_kernels, "MOST_STEP_ROWS", 4)
    for rows in (4, 5):
        for args in cases.plain_cases(CPU, [torch.float16], [rows], [(64, 1024)]):
            for row_invariant in (True, False):
                launched.clear()
                product = run(linear, *args, **result, row_invariant=row_invariant)
                assert ("linear_kernel" in launched) == (row_invariant or rows == 4)
                expected = linear(*args, **result)
                if "split_k_partials" in result:
                    assert (len(product) == 1) == (rows == 5 and not row_invariant)
                    product, expected = product.sum(0).half(), expected[0]
                cases.assert_close(product, expected, 1024)


needs_dependent_launch = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_dependent_launch(CUDA),
    reason="needs compute capability 9.0",
)
SHAPES = ((64, 128), (192, 384), (512, 1024), (1024, 4096))
"""Outputs and inputs, in one part and in several."""


def expected_of(x, weight, bias):
    wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return wide.to(x.dtype)


@pytest.mark.gpu
@needs_dependent_launch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 16, 17, 32, 33, 64, 65])
def test_products_match_those_in_float64(rows, dtype):
    for args in cases.plain_cases(CUDA, [dtype], [rows], (*SHAPES, (65, 128), (64, 100))):
        cases.assert_close(linear(*args), expected_of(*args), args[0].shape[1])


PRODUCTS = (
    TiledProduct(64, 16, 1, 4, 4, early_bytes=0), TiledProduct(64, 32, 2, 4, 4, early_bytes=512),
    TiledProduct(64, 64, 4, 4, 3, early_bytes=256), TiledProduct(32, 16, 2, 2, 6, early_bytes=128),
    TiledProduct(128, 64, 2, 8, 3, early_bytes=256),
    *sanitized(TiledProduct(32, 8, 4, 2, 4, 2, 256)),
)  # fmt: skip


@pytest.mark.gpu
@needs_dependent_launch
@pytest.mark.parametrize("config", PRODUCTS, ids=str)
def test_every_configuration_matches(config):
    op = OPS["linear"]
    for args in cases.plain_cases(CUDA, [torch.bfloat16], [7, 50], ((384, 1024), (130, 600))):
        got = op.launch(op.arguments(*args), config)
        cases.assert_close(got, expected_of(*args), args[0].shape[1])


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


@pytest.mark.gpu
@needs_dependent_launch
@needs_warpgroups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", STREAMED, ids=str)
def test_streamed_weights_match(product, dtype):
    op = OPS["linear"]
    for args in cases.plain_cases(CUDA, [dtype], [7, 50, 64], ((768, 1024), (768, 4096))):
        got = op.launch(op.arguments(*args), product)
        cases.assert_close(got, expected_of(*args), args[0].shape[1])
        x = args[0] / 16
        gated = op.launch(op.arguments(x, *args[1:], swiglu=True), product)
        expected = silu_and_mul(expected_of(x, *args[1:]))
        cases.assert_close(gated, expected, args[0].shape[1])


@pytest.mark.gpu
@needs_dependent_launch
@needs_warpgroups
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
def test_a_streamed_product_has_the_same_bits_each_time(shape):
    ((x, weight, _), _) = cases.plain_cases(CUDA, [torch.bfloat16], [48], (shape,))
    first = linear(x, weight)
    for _ in range(200):
        assert torch.equal(linear(x, weight), first)


@pytest.mark.gpu
@needs_dependent_launch
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


@pytest.mark.gpu
@needs_dependent_launch
def test_layers_differentiate_by_torch():
    layer = Linear(128, 64, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(4, 128, device=CUDA, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(64, 128).to(torch.bfloat16))


@pytest.mark.parametrize("options", [{}, {"swiglu": True}, {"split_k_partials": True}])
def test_torch_stands_in_while_kernels_are_compiled(options):
    op = OPS["linear"]
    args = op.arguments(torch.randn(3, 16), torch.randn(8, 16), torch.randn(8), **options)
    assert torch.equal(op.stand_in(args), linear(*args))
