"""Weights that are quantised here: their errors, their parts and their joins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantized_cases
from graphkit.errors import ConfigError
from graphkit.models.quantization.linear import (
    Linear,
    QuantizedLinear,
    merge_quantized,
    quantize_linears,
)
from graphkit.models.quantization.weight import (
    QUANTIZATIONS,
    QuantizedWeight,
    check_quantization,
    quantize_fp8,
    quantize_int4,
)

CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (5, 100), (130, 128), (7, 300)])
def test_fp8_is_within_half_a_step(shape):
    weight = random(*shape) * torch.logspace(-3, 3, shape[0])[:, None]
    got = quantize_fp8(weight)
    assert got.scale.shape == (shape[0], 1)
    error = (got.dequantized(torch.float32) - weight).abs()
    # Three bits of mantissa; numbers below 2 ** -6 have steps of 2 ** -9.
    steps = (weight.abs() / 16).maximum(got.scale * 2.0**-10)
    assert (error <= steps * 1.001).all()
    largest = got.numbers.float().abs().amax(1)
    assert torch.equal(largest, torch.full_like(largest, 448.0))


@pytest.mark.parametrize("shape", [(1, 1), (5, 100), (130, 128), (7, 300)])
def test_int4_is_within_a_step_of_its_group(shape):
    weight = random(*shape) + 0.3
    got = quantize_int4(weight)
    assert got.scale.shape == got.zero_point.shape == (shape[0], -(-shape[1] // 128))
    error = (got.dequantized(torch.float32) - weight).abs()
    steps = got.scale.float().repeat_interleave(128, 1)[:, : shape[1]]
    # Half a step, and as much at both ends: the zero point is a whole number.
    assert (error <= steps * 1.05).all()
    assert error.mean() <= steps.mean() * 0.3


def test_zeros_stay_zeros():
    for quantize in QUANTIZATIONS.values():
        assert not quantize(torch.zeros(3, 200)).dequantized(torch.float32).any()


def test_numbers_of_one_sign_keep_zero():
    """A group without negative numbers has a zero point all the same."""
    weight = torch.linspace(2, 3, 128)[None]
    got = quantize_int4(weight).dequantized(torch.float32)
    torch.testing.assert_close(got, weight, rtol=0, atol=0.11)


def test_parts_and_joins_have_the_numbers_of_the_whole():
    for _, numbers, scale, zero_point, inputs in quantized_cases.weights(CPU, ((300, 140),)):
        whole = QuantizedWeight(numbers, scale, zero_point, inputs)
        expected = whole.dequantized(torch.float32)
        for ends in ([300], [128, 300], [100, 110, 300]):
            parts = [whole.part(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
            assert torch.equal(
                parts[-1].dequantized(torch.float32), expected[-parts[-1].out_features :]
            )
            joined = QuantizedWeight.join(parts)
            assert torch.equal(joined.dequantized(torch.float32), expected)


def test_aligned_blocks_stay_blocks():
    fp8 = torch.float8_e4m3fn
    one = QuantizedWeight(torch.ones(256, 200).to(fp8), torch.rand(2, 2), None, 200)
    other = QuantizedWeight(torch.ones(40, 200).to(fp8), torch.rand(1, 2), None, 200)
    assert QuantizedWeight.join([one, other]).scale.shape == (3, 2)
    assert QuantizedWeight.join([other, one]).scale.shape == (296, 2)


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_merged_layers_share_memory_and_compute_the_same(name, bias):
    layers = nn.ModuleList(nn.Linear(200, size, bias=bias) for size in (130, 20, 64))
    quantize_linears(layers, name)
    x = random(2, 3, 200)
    expected = torch.cat([layer(x) for layer in layers], -1)
    merge_quantized(layers)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], -1), expected)
    for layer in layers:
        for key, tensor in layer.named_parameters():
            owner = layers[0].get_parameter(key)
            assert tensor.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr(), key


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_that_compute_something_else_or_are_kept_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again = Linear(8, 8), nn.Linear(8, 8)
            self.inner = nn.Sequential(self.again, Doubled(8, 8), nn.Embedding(4, 8))
            self.head = nn.Linear(8, 8)

    model = Model()
    assert quantize_linears(model, "fp8", kept=[model.head]) == 2
    assert isinstance(model.first, QuantizedLinear)
    assert model.again is model.inner[0]
    assert type(model.head) is nn.Linear
    assert type(model.inner[1]) is Doubled


def test_a_layer_states_its_bits_and_keeps_the_shape_of_rows():
    layer = QuantizedLinear(quantize_int4(random(6, 130)))
    assert "in_features=130, out_features=6, bits=4, scales=[6, 2]" in repr(layer)
    assert layer(random(2, 0, 130)).shape == (2, 0, 6)
    assert layer(random(130)).shape == (6,)
    assert layer(random(2, 3, 130).to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["int8", "FP8", 4, True])
def test_an_unknown_format_is_refused(name):
    with pytest.raises(ConfigError, match="expected 'fp8' or 'int4'") as caught:
        check_quantization(name)
    assert caught.value.field == "quantize"


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int4])
def test_parts_of_inputs_hold_the_numbers_of_the_weight(quantize):
    weight = quantize(torch.randn(8, 640, generator=torch.Generator().manual_seed(0)))
    for begin, end in ((0, 256), (128, 384), (256, 640)):
        part = weight.input_part(begin, end)
        expected = weight.dequantized(torch.float32)[:, begin:end]
        torch.testing.assert_close(part.dequantized(torch.float32), expected, rtol=0, atol=0)
