"""Kernels in Gluon against the reference, on the CPU by ``gluon_interpreter``."""

from __future__ import annotations

import pytest
import torch
import triton

import quantized_cases
from gluon_interpreter import Barrier, BoxCopies, Described, ThreadCopies, run_kernel
from graphkit.ops.kernels.quantized_numbers import nibble_ptx
from graphkit.ops.kernels.streamed_launch import weight_descriptor
from graphkit.ops.kernels.streamed_product import StreamedProduct
from graphkit.ops.linear import linear
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.registration import OPS

CPU = torch.device("cpu")


def nibbles(loaded, offset, x, ptx, pack):
    """Return what ``nibbles`` of ``streamed_tile.py`` does by PTX."""
    dtype = x.tensor.dtype
    is_high = ptx == nibble_ptx(dtype, pack, has_zeros=offset is not None)[1]
    number = (loaded >> 4 if is_high else loaded & 15).to(torch.float32)
    units = 64 if dtype == torch.bfloat16 else 512
    offset = -8 / units if offset is None else offset.to(torch.float32)
    return (number / units + offset).to(dtype)


@pytest.fixture
def interpreted(monkeypatch):
    def run(kernel, *args, grid, **options):
        run_kernel(kernel, grid, args, {"nibbles": nibbles})

    monkeypatch.setattr(triton.JITFunction, "run", run)


STREAMED = [
    StreamedProduct(*each, in_order=in_order)
    for each in (
        (64, 8, 1, 2), (64, 8, 4, 3), (128, 16, 2, 5), (64, 32, 1, 3, 2), (64, 8, 1, 2, 4, 2),
        (64, 16, 2, 2, 8, 2), (64, 8, 1, 2, 16, 4), (96, 8, 1, 3), (48, 8, 2, 2, 4, 2),
    )
    for in_order in (True, False)
]  # fmt: skip
STREAMED += [
    StreamedProduct(*each, by_warpgroups=True, in_order=in_order)
    for each in ((64, 64, 2, 3), (96, 64, 1, 4, 8), (48, 64, 1, 2), (64, 32, 1, 3))
    for in_order in (True, False)
]
CALLS = [
    (product, result)
    for product in STREAMED
    for result in ({"split_k_partials": True}, {"swiglu": True})
    if product.splits == 1 or "split_k_partials" in result  # another kernel gates the sum of parts
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("product", "result"), CALLS, ids=str)
def test_streamed_weights_match_the_reference(product, result, dtype, interpreted):
    op = OPS["quantized_linear"]
    for x, *others in quantized_cases.cases(CPU, [dtype], [7], shapes=((768, 1024),)):
        args = x / 16, *others
        got = op.launch(op.arguments(*args, **result), product)
        expected = quantized_linear(*args, **result)
        if "split_k_partials" in result:
            got, expected = got.sum(0).to(dtype), expected[0]
        quantized_cases.assert_close(got, expected, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    "product",
    [
        StreamedProduct(64, 8, 1, 2), StreamedProduct(64, 8, 4, 3, sums=1),
        StreamedProduct(64, 16, 2, 2, 8, 2, sums=2), StreamedProduct(64, 8, 1, 2, 16, 4, sums=4),
        *(
            StreamedProduct(*each, sums=sums, by_warpgroups=True)
            for sums, *each in (
                (2, 64, 64, 1, 3), (4, 96, 64, 1, 4, 8), (2, 48, 64, 2, 2), (1, 64, 64, 4, 2),
                (2, 64, 32, 1, 5),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_all_kernels_add_the_same_numbers_in_the_same_order(product, interpreted):
    """``test_tiles_add_the_same_numbers_in_the_same_order`` has the kernels that do not stream."""
    op = OPS["quantized_linear"]
    for args in quantized_cases.cases(CPU, [torch.float16], [5], shapes=((192, 1024),)):
        if args[1].dtype == torch.uint8 and product.sums == 4:
            continue  # 4 lines
        got = op.launch(op.arguments(*args, split_k_partials=True), product)
        want = quantized_cases.parts_in_order(*args, product.splits, product.sums)
        assert torch.equal(got, want)


PLAIN = [
    StreamedProduct(*each)
    for each in (
        (64, 16, 1, 3, 4), (256, 64, 4, 9, 8), (128, 32, 2, 5, 4), (96, 64, 1, 4, 8),
        (64, 16, 1, 2, 4, 2), (96, 64, 2, 3, 8, 2), (128, 16, 1, 2, 4, 4),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("product", PLAIN, ids=str)
def test_streamed_weights_of_16_bits_match_the_reference(product, interpreted):
    op = OPS["linear"]
    results = [{"split_k_partials": True}] + [{"swiglu": True}] * (product.splits == 1)
    for result in results:
        for x, *others in quantized_cases.plain_cases(CPU, [torch.bfloat16], [7], [(768, 1024)]):
            args = x / 16, *others
            got = op.launch(op.arguments(*args, **result), product)
            expected = linear(*args, **result)
            if "split_k_partials" in result:
                got, expected = got.sum(0).to(x.dtype), expected[0]
            quantized_cases.assert_close(got, expected, 1024)


@pytest.mark.parametrize("by_warpgroups", [False, True])
def test_no_rows_have_no_products(by_warpgroups, interpreted):
    op = OPS["quantized_linear"]
    product = StreamedProduct(64, 16, 2, 3, by_warpgroups=by_warpgroups)
    for x, *others in quantized_cases.cases(CPU, [torch.float16], [0], shapes=((768, 1024),)):
        for result in ({}, {"swiglu": True}, {"split_k_partials": True}):
            got = op.launch(op.arguments(x, *others, **result), product)
            assert got.shape[-2:] == (0, 384 if "swiglu" in result else 768)


class Requests:
    """The requests of a weight before those of rows: all, and the most in flight."""

    def __init__(self, monkeypatch):
        self.made = self.in_flight = self.most = 0
        self.has_rows = False
        request, arrive = BoxCopies.async_copy_global_to_shared, Barrier.wait
        by_threads, wait_group = ThreadCopies.async_copy_global_to_shared, ThreadCopies.wait_group

        def request_box(boxes, tensor, place, barrier, shared, pred):
            self.add(tensor.tensor.dtype != torch.uint8)
            request(boxes, tensor, place, barrier, shared, pred)

        def wait(barrier, phase):
            self.in_flight -= len(barrier.copies)
            arrive(barrier, phase)

        def copy_by_threads(threads, shared, pointer, mask=None):
            self.add(pointer.memory.numel() == 1024)
            by_threads(threads, shared, pointer, mask)

        def wait_for_groups(threads, pending):
            self.in_flight = min(self.in_flight, pending)
            wait_group(threads, pending)

        monkeypatch.setattr(BoxCopies, "async_copy_global_to_shared", request_box)
        monkeypatch.setattr(Barrier, "wait", wait)
        monkeypatch.setattr(ThreadCopies, "async_copy_global_to_shared", copy_by_threads)
        monkeypatch.setattr(ThreadCopies, "wait_group", wait_for_groups)

    def add(self, is_row):
        self.has_rows |= is_row
        if not self.has_rows:
            self.made, self.in_flight = self.made + 1, self.in_flight + 1
            self.most = max(self.most, self.in_flight)


@pytest.mark.parametrize("by_warpgroups", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2, 9])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_few_stages_are_requested_at_a_time_while_the_kernel_before_runs(
    bits, in_flight, by_warpgroups, interpreted, monkeypatch
):
    """Stages of four bits that are not in flight by then are requested behind the rows."""
    stages, x = 4, torch.zeros(1, 1024, dtype=torch.bfloat16)
    if bits == 16:
        name, tensors = "linear", [torch.zeros(64, 1024, dtype=torch.bfloat16)]
    else:
        name, kind = "quantized_linear", {4: "int4 asymmetric", 8: "fp8 channel"}[bits]
        (tensors, *_) = [
            each for found, *each, _ in quantized_cases.weights(CPU, [(64, 1024)]) if found == kind
        ]
    by_warpgroups = by_warpgroups and bits < 16
    product = StreamedProduct(64, 16, 1, stages, in_flight=in_flight, by_warpgroups=by_warpgroups)
    requests = Requests(monkeypatch)
    OPS[name].launch(OPS[name].arguments(x, *tensors, split_k_partials=True), product)
    expected = {16: stages, 8: stages - 1, 4: min(in_flight, stages - 1)}[bits]
    assert requests.has_rows
    assert requests.made == expected
    assert requests.most == min(in_flight, expected)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_box_of_a_padded_tile_has_the_outputs_of_one_program(is_gated):
    numbers = torch.arange(1, 97, dtype=torch.uint8)[:, None].expand(96, 256).contiguous()
    weight = Described(weight_descriptor(numbers, StreamedProduct(48, 8, 1, 2), is_gated, 1))
    boxes = [weight.block_at([0, program, 0, 1, 0]) for program in range(2)]
    outputs = [set(box.unique().tolist()) - {0} for box in boxes]
    if is_gated:
        assert outputs == [{*range(1, 25), *range(49, 73)}, {*range(25, 49), *range(73, 97)}]
    else:
        assert outputs == [{*range(1, 49)}, {*range(49, 97)}]
