"""Tests of the distinction between rounding and wrong numbers."""

from __future__ import annotations

import pytest
import torch

from graphkit.audit.shadow.first_results import is_beyond_rounding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def numbers(dtype, count=4096):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sums_in_another_order_are_within_rounding(dtype):
    terms = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    one, other = (each.sum(0).to(dtype) for each in (terms, terms.flip(0)))
    assert not torch.equal(one, other)
    assert not is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.1, 2.0, -1.0, 0.0])
def test_wrong_numbers_are_beyond_rounding(dtype, factor):
    one = numbers(dtype)
    other = one.clone()
    other[100:104] *= factor
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_or_infinity_on_one_side_is_beyond_rounding(dtype, value):
    one = numbers(dtype)
    other = one.clone()
    other[9] = value
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)
    assert is_beyond_rounding(as_bytes(other), as_bytes(one), dtype)
    assert not is_beyond_rounding(as_bytes(other), as_bytes(other), dtype)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_integers_must_be_equal(kind):
    one = torch.full((1024,), 8191).to(kind)
    other = one.clone()
    other[0] = 0 if kind is torch.bool else 8190
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), torch.float32)
