"""``linear`` and ``project`` beside ``torch.nn.functional.linear``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from graphkit import InputError
from graphkit.models.quantization import Linear
from graphkit.ops import linear as module
from graphkit.ops.decoder import silu_and_mul
from graphkit.ops.linear import linear, project


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_products_have_the_bits_of_torch(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 40), (24, 40), (24,))
    )
    for args in ((x, weight), (x, weight, bias)):
        assert torch.equal(linear(*args), functional.linear(*args))


def test_results_may_be_gated_or_in_parts():
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    whole = functional.linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, gated=True), silu_and_mul(whole))
    assert torch.equal(linear(x, weight, bias, in_parts=True), whole[None])
    layer, rows = Linear(8, 6), torch.randn(2, 3, 8)
    gate, up = layer(rows).chunk(2, -1)
    torch.testing.assert_close(layer(rows, gated=True), functional.silu(gate) * up)
    assert torch.equal(layer(rows, in_parts=True), layer(rows)[None])


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
        linear(x, weight, gated=True)
    with pytest.raises(InputError, match="gated and in_parts are both True"):
        linear(x, weight[:4], gated=True, in_parts=True)


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
        assert torch.equal(layer(rows.as_subclass(OnCuda), in_parts=True), expected[None])
        assert called.pop() == (6, 8)
        wide = project(rows.float().as_subclass(OnCuda), layer.weight.float())
        assert wide.dtype == torch.float32
        assert len(called) == 1
    assert layer(rows.as_subclass(OnCuda)).requires_grad
    assert len(called) == 1


def test_state_and_class_are_those_of_torch():
    layer, plain = Linear(8, 4), torch.nn.Linear(8, 4)
    plain.load_state_dict(layer.state_dict())
    rows = torch.randn(3, 8)
    assert isinstance(layer, torch.nn.Linear)
    assert torch.equal(layer(rows), plain(rows))
