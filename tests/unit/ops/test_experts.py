"""Products of chosen experts on every device, against sums in float64 over each row and choice."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

import quantized_cases
from graphkit import InputError
from graphkit.models.quantization.linear import QuantizedExperts
from graphkit.models.quantization.weight import quantize_fp8, quantize_int4
from graphkit.ops.experts import (
    SEARCHED_ROWS,
    choose_experts,
    expert_linear,
    expert_sum,
    gated_products,
    group_by_expert,
    live_choices,
)
from graphkit.ops.kernels import experts as kernels
from graphkit.ops.quantized_layout import dequantized
from graphkit.ops.registration import OPS
from op_devices import CPU, CUDA, INTERPRETER, LOOPS, by, captured, on_cuda
from sanitized import sanitized

FORMATS = (
    "plain", "transposed", "fp8 tensor", "fp8 channel", "fp8 blocks", "int4 symmetric",
    "int4 asymmetric",
)  # fmt: skip
GATES = {
    "none": {},
    "swiglu": {"swiglu": True},
    "clamped": {"swiglu": True, "limit": 0.8},
    "gpt-oss": {
        "swiglu": True, "interleaved": True, "limit": 0.7, "alpha": 1.702, "offset": 1.0,
    },
}  # fmt: skip
OPTIONS = "interleaved", "limit", "alpha", "offset"
on_devices = by(CPU, INTERPRETER, CUDA, interpreted=[LOOPS])


@dataclass
class Case:
    """Arguments of a call, and the weights that they stand for.

    Attributes:
        x: [T, K].
        experts: [T, C].
        weight: What the op reads: weight, scale and zero point.
        matrices: [E, N, K] float64.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weight: list
    matrices: torch.Tensor
    bias: torch.Tensor | None

    @property
    def args(self):
        return self.x, self.experts, *self.weight, self.bias


def random_case(seed, form, dtype, *, rows=None, sizes=None, has_bias=None, experts=None):
    generator = torch.Generator().manual_seed(seed)

    def choose(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    def random(*shape):
        return torch.randn(shape, generator=generator)

    num_experts, choices = experts or choose((3, 2), (8, 2), (16, 4), (5, 1), (40, 8))
    outputs, inputs = sizes or (choose(16, 48, 70, 130), choose(24, 128, 200, 300))
    rows = choose(1, 2, 4, 9, 17, 33) if rows is None else rows
    x = random(rows, inputs).to(dtype)
    scores = random(rows, num_experts) + 2 * random(num_experts)
    chosen = scores.topk(choices).indices
    if choose(False, True):
        chosen[random(rows, choices) > 1] = choose(-1, num_experts, 7 * num_experts)
    bias = (
        random(num_experts, outputs).to(dtype) if choose(False, True) and has_bias is None else None
    )
    if form in ("plain", "transposed"):
        matrices = (random(num_experts, outputs, inputs) / inputs**0.5).to(dtype)
        if form == "transposed":
            matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
        return Case(x, chosen, [matrices, None, None], matrices.double(), bias)
    stored = []
    for expert in range(num_experts):
        made = quantized_cases.weights("cpu", ((outputs, inputs),), seed + expert)
        name, *weight, _ = [each for each in made if each[0] == form][-1]
        weight[1] = (weight[1] / inputs**0.5 / (8 if "int4" in name else 1)).to(weight[1].dtype)
        stored.append(weight)
    parts = [None if part[0] is None else torch.stack(part) for part in zip(*stored, strict=True)]
    matrices = torch.stack([dequantized(*each, inputs, torch.float64) for each in stored])
    return Case(x, chosen, parts, matrices, bias)


def exact(case, *, swiglu=False, interleaved=False, limit=0.0, alpha=1.0, offset=0.0):
    """Return the products of each row and choice in float64; zeros for what is no expert."""
    dtype, results = case.x.dtype, []
    for row, chosen in zip(case.x.double(), case.experts.tolist(), strict=True):
        for expert in chosen:
            if not 0 <= expert < len(case.matrices):
                results.append(None)
                continue
            product = (case.matrices[expert] @ row).to(dtype).double()
            if case.bias is not None:
                product = (product + case.bias[expert].double()).to(dtype).double()
            if swiglu:
                gate, up = product.chunk(2)
                if interleaved:
                    gate, up = product[::2], product[1::2]
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                product = (up + offset) * (gate * torch.sigmoid(alpha * gate)).to(dtype).double()
            results.append(product.to(dtype))
    return results


def assert_products(got, expected, inputs):
    assert len(got) == len(expected)
    is_one = [index for index, each in enumerate(expected) if each is not None]
    if is_one:
        rows = torch.stack([expected[index] for index in is_one])
        quantized_cases.assert_close(got[is_one], rows, inputs)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_the_chosen_experts(run, form, gate):
    for seed in range(4 if run is INTERPRETER else 12):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if run is INTERPRETER and dtype == torch.bfloat16:
                continue  # it multiplies none
            case = random_case(seed, form, dtype)
            got = run(expert_linear, *case.args, **GATES[gate])
            assert_products(got, exact(case, **GATES[gate]), case.x.shape[1])


@on_devices
def test_each_choice_may_have_a_row_of_its_own(run):
    for seed in range(6):
        case = random_case(seed, "plain", torch.float32)
        x = torch.randn(case.experts.numel(), case.x.shape[1])
        got = run(expert_linear, x, *case.args[1:])
        wide = Case(x, case.experts.view(-1, 1), case.weight, case.matrices, case.bias)
        assert_products(got, exact(wide), x.shape[1])


@on_devices
@pytest.mark.parametrize("form", FORMATS)
def test_sorted_pairs_have_the_bits_of_few_rows(run, form):
    dtype, rows = (torch.float32, 90) if run is INTERPRETER else (torch.bfloat16, 300)
    for seed in range(2 if run is INTERPRETER else 5):
        case = random_case(seed, form, dtype, rows=rows, has_bias=False)
        slots = torch.arange(len(case.x)) % 4
        is_live = live_choices(case.experts, slots, len(case.matrices)).flatten() >= 0
        whole = run(expert_linear, *case.args, slots, swiglu=True)
        parts = []
        for x, experts, some in zip(
            case.x.split(12), case.experts.split(12), slots.split(12), strict=True
        ):
            parts.append(run(expert_linear, x, experts, *case.weight, None, some, swiglu=True))
        got, whole = torch.cat(parts)[is_live], whole[is_live]
        if run is INTERPRETER:  # its sums depend on the tile
            torch.testing.assert_close(got, whole)
        else:
            assert torch.equal(got, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, quantize_fp8, quantize_int4])
def test_sums_that_cancel_have_the_bits_of_one_row(quantize):
    """The second half of the inputs subtracts the first in another order: rounding is left."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(8, 96, 256, generator=generator) / 16
    order = torch.cat([torch.randperm(128, generator=generator) + 128 * block for block in (0, 1)])
    matrices = torch.cat([half, half[:, :, order]], -1).bfloat16().cuda()
    x = torch.randn(2048, 256, generator=generator)
    x = torch.cat([x, -x[:, order]], 1).bfloat16().cuda()
    experts = torch.rand(2048, 8, generator=generator).topk(2).indices.cuda()
    weight = (matrices, None, None)
    if quantize is not None:
        held = QuantizedExperts([quantize(matrix) for matrix in matrices])
        weight = held.weight, held.scale, held.zero_point
    one = [expert_linear(x[row, None], experts[row, None], *weight) for row in range(300)]
    assert torch.cat(one).ne(0).float().mean() > 0.5
    for rows in (2, 7, 17, 40, 64, 65, 130, 300, 2048):
        got = expert_linear(x[:rows], experts[:rows], *weight)
        assert torch.equal(got[:600], torch.cat(one)[: 2 * rows]), rows


def test_row_invariant_tiles_are_those_of_warps():
    """Of quantised weights, warpgroups add other groups of inputs."""
    for bits, rows in itertools.product((4, 8), (1, 8, 9, 17, 64, 65, 256, 257, 5000)):
        tiles = kernels.choose_tiles(rows, bits)
        assert all(tile.pack == 4 for tile in (tiles.few, tiles.many) if tile is not None)
    assert kernels.choose_tiles(5000, 8, row_invariant=False).many.pack == 2


@pytest.mark.parametrize("row_invariant", [False, True])
def test_row_invariant_products_of_many_rows_run_by_the_kernel(row_invariant, monkeypatch):
    launched = []
    monkeypatch.setattr(kernels, "can_group", lambda *_: True)
    monkeypatch.setattr(kernels, "_grouped", lambda *_: launched.append("grouped"))
    monkeypatch.setattr(kernels, "launch", lambda kernel, *_, **__: launched.append(kernel))
    case = random_case(0, "plain", torch.bfloat16, rows=70, sizes=(64, 128))
    order, ends = group_by_expert(case.experts, len(case.matrices))
    args = kernels_args(case, row_invariant=row_invariant, order=order, ends=ends)
    pairs = case.experts.numel() / len(case.matrices)
    for most in (pairs, pairs - 0.1):
        monkeypatch.setattr(kernels, "MOST_ROWS_OF_EXPERT", most)
        kernels.launch_expert_linear(args)
    few = kernels.expert_linear_kernel
    assert launched == [few, few if row_invariant else "grouped"]


@pytest.mark.parametrize("gate", GATES)
def test_a_grouped_product_of_torch_gives_the_products(gate, monkeypatch):
    """On the CPU, whose ``grouped_mm`` does not wait for sizes on the host either."""
    monkeypatch.setattr(kernels, "gate_rows", gate_on_cpu)
    for seed in range(6):
        for form in ("plain", "transposed"):
            case = random_case(seed, form, torch.bfloat16, rows=70, sizes=(64, 128))
            args = kernels_args(case, **GATES[gate])
            order, ends = group_by_expert(case.experts, len(case.matrices))
            columns = 32 if args.swiglu else 64
            out = torch.full((case.experts.numel(), columns), torch.nan, dtype=torch.bfloat16)
            options = {name: getattr(args, name) for name in OPTIONS}
            got = kernels._grouped(args, case.x, order, ends, out, options)
            assert_products(got, exact(case, **GATES[gate]), 128)


def kernels_args(case, **options):
    return OPS["expert_linear"].arguments(*case.args, **options)


def gate_on_cpu(_args, products, out, *, interleaved, limit, alpha, offset):
    return out.copy_(gated_products(products, interleaved, limit, alpha, offset))


@on_devices
def test_pairs_are_grouped_by_expert(run, monkeypatch):
    for seed in range(20):
        case = random_case(seed, "plain", torch.float32)
        slots = torch.arange(len(case.x)) % 3 if seed % 2 else None
        if run is CUDA and seed > 15:
            monkeypatch.setattr(kernels, "MOST_COUNTED", 1)
        order, ends = run(group_by_expert, case.experts, len(case.matrices), slots)
        live = live_choices(case.experts, slots, len(case.matrices)).flatten().tolist()
        keys = [expert if expert >= 0 else len(case.matrices) for expert in live]
        assert order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
        expected = [sum(key <= expert for key in keys) for expert in range(len(case.matrices))]
        assert ends.tolist() == expected


@on_devices
def test_pads_touch_no_expert(run):
    """Weights of experts that only pads chose are NaN, and so are the rows of pads."""
    for seed in range(6):
        case = random_case(seed, "plain", torch.float32, rows=9)
        slots = torch.arange(9) % 3  # every third row is a pad
        live = live_choices(case.experts, slots, len(case.matrices))
        unused = sorted({*range(len(case.matrices))} - {*live.flatten().tolist()})
        weight = case.weight[0].clone()
        weight[unused] = torch.nan
        case.x[slots == 0] = torch.nan
        products = run(expert_linear, case.x, case.experts, weight, None, None, case.bias, slots)
        factors = torch.rand(case.experts.shape)
        factors[slots == 0] = torch.nan
        got = run(expert_sum, products, factors, case.experts, len(weight), slots)
        assert got[slots == 0].eq(0).all()
        assert got.isfinite().all()


@on_devices
def test_sums_are_weighted_in_the_order_of_the_choices(run):
    for seed in range(6):
        case = random_case(seed, "plain", torch.float32)
        for dtype in (torch.float32, torch.float16):
            rows = torch.randn(case.experts.numel(), 600).to(dtype)
            factors = torch.rand(case.experts.shape).to(dtype)
            expected = torch.zeros(len(case.experts), 600)
            for row, chosen in enumerate(case.experts.tolist()):
                for place, expert in enumerate(chosen):
                    if 0 <= expert < len(case.matrices):
                        term = rows[row * len(chosen) + place].float() * factors[row, place].float()
                        expected[row] += term
            rows[live_choices(case.experts, None, len(case.matrices)).flatten() < 0] = math.nan
            got = run(expert_sum, rows, factors, case.experts, len(case.matrices))
            assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("has_gate", [False, True])
@by(CPU, INTERPRETER, CUDA)
def test_shared_experts_are_added_to_the_rounded_sum(run, has_gate):
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        experts = torch.tensor([[0, 1], [2, 0], [1, 2]])
        rows, shared, gate = (
            torch.randn(sizes, generator=generator).to(dtype)
            for sizes in ((6, 600), (3, 600), (3, 1))
        )
        factors = torch.rand(3, 2, generator=generator).to(dtype)
        added = (shared, gate) if has_gate else (shared,)
        got = run(expert_sum, rows, factors, experts, 3, None, *added)
        expected = run(expert_sum, rows, factors, experts, 3)
        expected = expected + (torch.sigmoid(gate) * shared if has_gate else shared)
        near = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got, expected, rtol=near, atol=near)


@pytest.mark.parametrize(("count", "choices"), [(3, 3), (128, 8), (300, 10)])
@by(CPU, INTERPRETER, CUDA)
def test_the_most_probable_experts_are_chosen(run, count, choices):
    """In order, the first of equal ones, whatever the other rows are; spaced rows are read."""
    generator = torch.Generator().manual_seed(count)
    for dtype, normalise in itertools.product((torch.float32, torch.float16), (False, True)):
        logits = torch.randn(7, count + 5, generator=generator).to(dtype)[:, :count]
        logits[1], logits[2, -1] = 0.5, 30.0
        factors, experts = run(choose_experts, logits, choices, normalise, True)
        probs = logits.double().softmax(-1)
        expected = probs.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(experts, expected.indices[:, :choices])
        wanted = expected.values[:, :choices]
        wanted = wanted / wanted.sum(-1, keepdim=True) if normalise else wanted
        near = 1e-6 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(factors.double(), wanted, rtol=near, atol=near)
        assert factors.dtype == dtype
        for row in range(7):
            one, other = run(choose_experts, logits[row : row + 1], choices, normalise, True)
            assert torch.equal(one[0], factors[row])
            assert torch.equal(other[0], experts[row])
    wide, _ = run(choose_experts, logits.half(), choices)
    assert wide.dtype == torch.float32


@by(CPU, INTERPRETER, CUDA)
def test_rows_without_numbers_choose_different_experts(run):
    logits = torch.tensor([[math.nan] * 5, [0.0, math.nan, 1, 2, 3]])
    _, experts = run(choose_experts, logits, 3)
    for row in experts.tolist():
        assert len(set(row)) == 3
        assert all(0 <= expert < 5 for expert in row)


@on_devices
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_the_bits_of_a_row_depend_on_the_row_alone(run, form, is_wide):
    if run is INTERPRETER and is_wide:
        pytest.skip("its sums of float32 depend on the tile")
    dtype = torch.float16 if run is INTERPRETER else torch.bfloat16
    dtype = torch.float32 if is_wide else dtype
    case = random_case(
        3, form, dtype, rows={CPU: 64, INTERPRETER: 12, CUDA: 64}[run], has_bias=False
    )
    factors, count = torch.rand(case.experts.shape), len(case.matrices)

    def call(x, experts, factors):
        gated = run(expert_linear, x, experts, *case.weight, swiglu=True)
        return run(expert_sum, gated, factors, experts, count)

    whole = call(case.x, case.experts, factors)
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 3, 5, 11, 17, 33):
        some = torch.randperm(len(case.x), generator=generator)[:rows]
        assert torch.equal(call(case.x[some], case.experts[some], factors[some]), whole[some]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*sanitized(3, 20, 70), 1, 8, 64, 300])
@pytest.mark.parametrize("form", FORMATS)
def test_experts_of_a_served_shape(form, rows):
    """Products of 1,536 outputs and 2,048 inputs, and rows that leave many experts out."""
    case = random_case(
        5, form, torch.bfloat16, rows=rows, sizes=(1536, 2048), experts=(16, 4)
    )  # fmt: skip
    for gate in GATES.values():
        got = CUDA(expert_linear, *case.args, **gate)
        assert_products(got, exact(case, **gate), 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
@pytest.mark.parametrize("form", FORMATS)
def test_a_product_that_follows_another_reads_its_rows_when_they_are_written(form, rows):
    """In a graph whose rows change before each replay, after results that are poisoned."""
    options = {"rows": rows, "has_bias": False, "experts": (16, 4)}
    first = random_case(1, form, torch.bfloat16, sizes=(1024, 512), **options)
    second = random_case(1, form, torch.bfloat16, sizes=(512, 512), **options)
    up, down = ([on_cuda(each) for each in case.weight] for case in (first, second))
    x, experts = first.x.cuda(), first.experts.cuda()
    slots = torch.arange(1, rows + 1, device="cuda")
    factors, count = torch.rand(experts.shape, device="cuda"), len(up[0])
    plan = group_by_expert(experts, count, slots) if rows > SEARCHED_ROWS else (None, None)

    def layer(follows):
        inner = expert_linear(x, experts, *up, None, slots, *plan, swiglu=True)
        out = expert_linear(inner, experts, *down, None, slots, *plan, follows_product=follows)
        return inner, out, expert_sum(out, factors, experts, count, slots)

    graph = captured(CUDA, lambda: layer(True))
    for seed in range(30):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        expected = layer(False)[-1]
        for each in graph.output:
            each.fill_(torch.nan)
        graph.replay()
        assert torch.equal(graph.output[-1], expected)


X, CHOICES, WEIGHT = torch.ones(2, 200), torch.zeros(2, 3).long(), torch.ones(4, 6, 200)
FP8 = WEIGHT.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X[:1], CHOICES, WEIGHT), "x is .*expected 2 rows, or 6, one for each choice"),
        ((X.double(), CHOICES, WEIGHT), "weight is .*expected torch.float64"),
        ((X, CHOICES, WEIGHT[..., :100]), "weight is .*expected 200 columns"),
        ((X, CHOICES, FP8), "scale is None. Pass scales"),
        ((X, CHOICES, WEIGHT, torch.ones(4, 6, 1)), "only for them"),
        ((X, CHOICES, FP8, torch.ones(4, 3, 1)), "expected 1, 1 or 6 rows of an expert"),
        ((X, CHOICES, FP8, torch.ones(4, 6, 1), torch.ones(4, 6, 1).byte()), "zero_point is for"),
        ((X, CHOICES, WEIGHT[:, :5], *[None] * 6, True), "an even number of outputs"),
    ],
)
def test_refusals(args, text):
    with pytest.raises(InputError, match=text):
        expert_linear(*args)


def test_a_sum_needs_a_row_for_each_choice():
    with pytest.raises(InputError, match=r"rows is .*expected 6 rows, one for each choice"):
        expert_sum(torch.ones(5, 8), torch.ones(2, 3), CHOICES, 4)
