"""Limits of rounding, in ulp of the dtype of a step."""

from __future__ import annotations

import math

import pytest
import torch

import graphkit as gk
from graphkit.runners.comparison import Rounding

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [0.01, 1.0, 64.0])
def test_an_ulp_is_relative_to_the_largest_number_and_at_least_to_1(dtype, largest):
    field = torch.tensor([[-largest, 0.0]], dtype=dtype)
    expected = torch.finfo(dtype).eps * max(1.0, largest)
    assert Rounding(dtype).ulp(field) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "field", "measured"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_coarser_dtype_counts(step, field, measured):
    """A step in bfloat16 may return float32 logits."""
    rounding, ones = Rounding(step), torch.ones(2, 2, dtype=field)
    assert rounding.coarser_dtype(ones) is measured
    assert rounding.ulp(ones) == torch.finfo(measured).eps


@pytest.mark.parametrize("odd", [INF, -INF, NAN])
def test_infinities_and_nan_do_not_widen_an_ulp(odd):
    rounding = Rounding(torch.float32)
    assert rounding.ulp(torch.tensor([[odd, 2.0]])) == 2 * torch.finfo(torch.float32).eps
    assert rounding.ulp(torch.tensor([[odd]])) == torch.finfo(torch.float32).eps


def test_integers_have_no_ulp():
    assert Rounding(torch.float32).ulp(torch.tensor([[1], [2]])) == 0.0


@pytest.mark.parametrize("tolerance", [0.5, 1.0, 3])
def test_the_limit_follows_what_the_step_itself_rounds(tolerance):
    rounding = Rounding(torch.float32, tolerance)
    limits = [rounding.beside(natural) / tolerance for natural in (0.0, 1.0, 5.0, 10.0, 1e9, INF)]
    assert limits == [8, 8, 20, 40, 256, 256]
    assert rounding.most == 256 * tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_kernels_that_add_in_a_wider_dtype_round_little(dtype):
    """64 ulp of bfloat16 are half of a number."""
    assert Rounding(dtype).most == Rounding(dtype).beside(INF) == 16
    assert Rounding(dtype).beside(3.0) == 12


@pytest.mark.parametrize("tolerance", [0, -1, NAN, INF, True, None, "2"])
def test_a_tolerance_is_a_finite_number_above_0(tolerance):
    with pytest.raises(gk.ConfigError, match="tolerance must be a number above 0") as caught:
        Rounding(torch.float32, tolerance)
    assert caught.value.field == "tolerance"
