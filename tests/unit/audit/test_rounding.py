"""Telling numbers that were added up in another order from other numbers."""

from __future__ import annotations

import pytest
import torch

from graphkit.audit.shadow.rounding import is_beyond_rounding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def numbers(dtype, count=4096):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_sum_in_another_order_is_near(dtype):
    terms = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    one, other = (each.sum(0).to(dtype) for each in (terms, terms.flip(0)))
    assert not torch.equal(one, other)
    assert not is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.1, 2.0, -1.0, 0.0])
def test_other_numbers_are_far(dtype, factor):
    one = numbers(dtype)
    other = one.clone()
    other[100:104] *= factor
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_on_one_side_is_far(dtype, value):
    one = numbers(dtype)
    other = one.clone()
    other[9] = value
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), dtype)
    assert is_beyond_rounding(as_bytes(other), as_bytes(one), dtype)
    assert not is_beyond_rounding(as_bytes(other), as_bytes(other), dtype)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_whole_numbers_must_be_equal(kind):
    one = torch.full((1024,), 8191).to(kind)
    other = one.clone()
    other[0] = 0 if kind is torch.bool else 8190
    assert is_beyond_rounding(as_bytes(one), as_bytes(other), torch.float32)
