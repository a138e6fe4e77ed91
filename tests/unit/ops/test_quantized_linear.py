"""``quantized_linear`` on every device, against weights dequantised number by number."""

from __future__ import annotations

import pytest
import torch

import quantized_cases as cases
from graphkit import InputError
from graphkit.ops.kernels import (
    decoder,
    quantized_linear as kernels,
    quantized_linear_config as config,
    tiled_linear,
)
from graphkit.ops.kernels.quantized_linear_config import TiledProduct, choose_product
from graphkit.ops.kernels.streamed_linear_config import FEW_ROWS
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.quantized_layout import dequantized, packed_numbers
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.registration import OPS
from op_devices import INTERPRETER, by
from sanitized import sanitized

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = ((4096, 4096), (1000, 14336))


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
    for _, weight, scale, zero_point, inputs in cases.weights(CPU, ((3, 5), (130, 140), (2, 390))):
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
    for x, weight, scale, zero_point, bias in cases.cases(CPU, [dtype], [rows]):
        matrix = dequantized(weight, scale, zero_point, x.shape[1], torch.float64)
        expected = x.double() @ matrix.T + (0 if bias is None else bias.double())
        got = quantized_linear(x, weight, scale, zero_point, bias)
        cases.assert_close(got, expected.to(dtype), x.shape[1])


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


def check(run, dtypes, rows, **options):
    """Compare with the reference. The interpreter multiplies no bfloat16."""
    for args in cases.cases(CPU, dtypes, rows, **options):
        got = run(quantized_linear, *args)
        cases.assert_close(got, quantized_linear(*args), args[0].shape[1])


@by(INTERPRETER)
def test_products_match_the_reference(run):
    check(run, (torch.float32, torch.float16), (0, 1, 3))


@by(INTERPRETER)
@pytest.mark.parametrize("most_rows", [2, 256])
def test_products_that_need_no_order_match_the_reference(run, most_rows, monkeypatch):
    monkeypatch.setattr(config, "MOST_ROWS", most_rows)
    for args in cases.cases(CPU, (torch.float16,), (3, 33), shapes=((40, 648),)):
        got = run(quantized_linear, *args, row_invariant=False)
        cases.assert_close(got, quantized_linear(*args), args[0].shape[1])


@by(INTERPRETER)
def test_tiles_of_rows_match_the_reference(run):
    check(run, (torch.float32,), (64, 65, 130), shapes=((40, 72), (130, 200)))


@by(INTERPRETER)
def test_split_inputs_match_the_reference(run, monkeypatch, launched):
    monkeypatch.setattr(config, "LEAST_BLOCKS", 2)  # several blocks in each part
    check(run, (torch.float32, torch.float16), (1, 33), shapes=((40, 648), (264, 600)))
    assert "sum_parts_kernel" in launched


@by(INTERPRETER)
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("inputs", [128, 300, 384, 512, 640, 1000], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a large negative gate: 0
def test_pairs_of_blocks_that_are_not_whole_match_the_reference(run, inputs, rows, monkeypatch):
    """Each scale and zero point counts for its block, if the last pair has one block or a part."""
    counts = set()
    for least in (1, 8):
        monkeypatch.setattr(config, "LEAST_BLOCKS", least)
        for x, *others in cases.cases(CPU, [torch.float16], [rows], [(64, inputs)]):
            if others[0].dtype != torch.uint8:
                continue
            args = x / 16, *others
            expected = quantized_linear(*args)
            cases.assert_close(run(quantized_linear, *args), expected, inputs)
            gated = run(quantized_linear, *args, swiglu=True)
            cases.assert_close(gated, quantized_linear(*args, swiglu=True), inputs)
            parts = run(quantized_linear, *args, split_k_partials=True)
            cases.assert_close(parts.sum(0).half(), expected, inputs)
            counts.add(len(parts))
    assert counts == {1, -(-inputs // 256)}


@by(INTERPRETER)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((128, 384), ["linear_kernel"]),
        ((64, 1024), ["linear_kernel", "sum_parts_kernel", "silu_and_mul_kernel"]),
        ((72, 128), ["linear_kernel", "silu_and_mul_kernel"]),
    ],
    ids=["whole", "split", "uneven"],
)
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a large negative gate: 0
def test_a_product_applies_the_gate_itself_where_its_tiles_hold_both(
    run, shape, names, rows, launched
):
    for x, *others in cases.cases(CPU, [torch.float16], [rows], [shape]):
        if rows > FEW_ROWS and shape[0] == 128:
            assert config.choose_product(rows, shape[1], 128, 8, CPU, x.dtype).pack == 2
        x = x / 16  # products of gate and up projection stay within float16
        launched.clear()
        got = run(quantized_linear, x, *others, swiglu=True)
        cases.assert_close(got, quantized_linear(x, *others, swiglu=True), shape[1])
        assert launched == names or len(others[0]) != shape[0]


@by(INTERPRETER)
def test_many_rows_run_over_a_converted_weight(run, monkeypatch, launched):
    monkeypatch.setattr(config, "FEW_ROWS", 2)
    monkeypatch.setattr(config, "MOST_ROWS", 2)
    monkeypatch.setattr(kernels, "MOST_ROWS_IN_PARTS", 8)
    check(run, (torch.float16,), (3,))
    check(run, (torch.float16,), (19,), shapes=((24, 1100),))
    assert "widen_kernel" in launched


@by(INTERPRETER)
@pytest.mark.parametrize(("splits", "sums"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.usefixtures("products_in_order")
def test_tiles_add_the_same_numbers_in_the_same_order(run, splits, sums):
    """``test_all_kernels_add_the_same_numbers_in_the_same_order`` has those that stream."""
    for args in cases.cases(CPU, [torch.float16], [5], shapes=((192, 1024),)):
        want = cases.parts_in_order(*args, splits, sums)
        line_steps = 2 if args[1].dtype == torch.uint8 else 1
        for product in (
            TiledProduct(64, 16, splits, sums=sums),
            TiledProduct(
                128, 16, splits, early_bytes=0, sums=sums, line_steps=line_steps, widens=True
            ),
        ):
            launch = {"product": product}
            got = run(quantized_linear, *args, split_k_partials=True, launch=launch)
            assert torch.equal(got, want)


def on_cpu(args):
    return [None if each is None else each.cpu() for each in args]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 130, 256, 300, 1100])
@pytest.mark.parametrize("row_invariant", [True, False])
def test_the_kernel_matches_the_reference(rows, row_invariant):
    for args in cases.cases(CUDA, DTYPES, [rows]):
        expected = quantized_linear(*on_cpu(args))
        got = quantized_linear(*args, row_invariant=row_invariant)
        cases.assert_close(got.cpu(), expected, args[0].shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_large_weights_match_the_reference(rows):
    for args in cases.cases(CUDA, [torch.bfloat16], [rows], shapes=LARGE):
        expected = quantized_linear(*on_cpu(args))
        cases.assert_close(quantized_linear(*args).cpu(), expected, args[0].shape[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 20, 40])
@pytest.mark.parametrize("inputs", [128, 384, 512, 1000, 4224], ids=str)
def test_gates_and_parts_of_pairs_that_are_not_whole_match_the_reference(inputs, rows):
    for x, *others in cases.cases(CUDA, [torch.bfloat16], [rows], shapes=((256, inputs),)):
        args = x / 16, *others
        gated = quantized_linear(*args, swiglu=True).cpu()
        cases.assert_close(gated, quantized_linear(*on_cpu(args), swiglu=True), inputs)
        parts = quantized_linear(*args, split_k_partials=True)
        got = parts.sum(0).to(x.dtype).cpu()
        cases.assert_close(got, quantized_linear(*on_cpu(args)), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_products_are_captured_without_a_synchronisation(rows):
    for args in cases.cases(CUDA, [torch.bfloat16], [rows], shapes=((264, 4096),)):
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
    StreamedProduct(*each, in_order=in_order)
    for each in (
        (64, 8, 1, 2), (64, 8, 4, 3), (128, 16, 2, 5), (32, 8, 2, 4, 1),
        (64, 32, 1, 3, 2), (128, 8, 1, 5, 8), (32, 8, 1, 3, 2), (64, 8, 1, 2, 8, 2),
        (64, 32, 1, 2, 16, 4), (128, 16, 2, 3, 16, 2), (32, 8, 1, 3, 8, 4),
    )
    for in_order in (True, False)
]  # fmt: skip
STREAMED += [
    StreamedProduct(*each, by_warpgroups=True, in_order=in_order)
    for each in ((64, 64, 2, 3), (96, 64, 1, 4, 8), (64, 32, 2, 3))
    for in_order in (True, False)
]
STREAMED += sanitized(StreamedProduct(96, 8, 1, 3, 8), StreamedProduct(48, 16, 2, 2, 8, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("result", [{}, {"swiglu": True}, {"split_k_partials": True}], ids=str)
@pytest.mark.parametrize("product", STREAMED, ids=str)
def test_streamed_weights_match_the_reference(product, result, dtype):
    op = OPS["quantized_linear"]
    for x, *others in cases.cases(CUDA, [dtype], [1, 7, 32, 50], shapes=((768, 1024),)):
        args = x / 16, *others
        got = op.launch(op.arguments(*args, **result), product)
        expected = quantized_linear(*on_cpu(args), **result)
        if "split_k_partials" in result:
            got, expected = got.sum(0).to(dtype), expected[0]
        cases.assert_close(got.cpu(), expected, 1024)


@pytest.mark.gpu
def test_rows_and_weights_that_are_not_aligned_are_copied():
    for x, weight, *others in cases.cases(CUDA, [torch.bfloat16], [3], shapes=((64, 512),)):
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", PRODUCTS, ids=str)
def test_every_configuration_matches_the_reference(config, dtype):
    op = OPS["quantized_linear"]
    for args in cases.cases(CUDA, [dtype], [7, 33], shapes=((384, 1024), (130, 600))):
        got = op.launch(op.arguments(*args), config).cpu()
        cases.assert_close(got, quantized_linear(*on_cpu(args)), args[0].shape[1])


@pytest.mark.gpu
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
