"""Differences between two outputs, whole or by row, and the limits of rounding, in ulp."""

from __future__ import annotations

import math

import pytest
import torch

import graphkit as gk
from graphkit.config import BufferSizes
from graphkit.models.wrapper.model_logits import MOST_ROWS, RowDifferences, rows_at_once
from graphkit.records import distinct_text
from graphkit.runners.comparison.differences import (
    Rounding,
    allowed_by,
    first_difference,
    largest_difference,
    largest_ulps,
)

INF, NAN = math.inf, math.nan
FLOAT = Rounding(torch.float32)
EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def own(row, rows):
    """Return the owner of a row where each request has one."""
    return row


def output(rows, dtype=torch.float32):
    return {"logits": torch.tensor(rows, dtype=dtype)}


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.5, 2.0], [3.0, 2.0]], 2.0),
        ([[NAN, -INF]], [[NAN, -INF]], 0.0),
        ([[NAN]], [[1.0]], INF),
        ([[1.0]], [[NAN]], INF),
        ([[INF]], [[1.0]], INF),
        ([[INF]], [[-INF]], INF),
        ([[0.0]], [[-0.0]], 0.0),
    ],
)
def test_the_largest_difference(expected, got, difference):
    assert largest_difference(output(expected), output(got)) == difference


def test_the_largest_difference_is_over_all_floating_point_fields():
    """The distance between two token ids has no meaning."""
    one = {"logits": torch.zeros(2, 3), "hidden": torch.ones(2, 1), "tokens": torch.tensor([1, 2])}
    other = {"logits": torch.full((2, 3), 0.5), "hidden": torch.full((2, 1), 3.0)}
    assert largest_difference(one, other | {"tokens": torch.tensor([1, 9])}) == 2.0


@pytest.mark.parametrize("lacking", ["expected", "got"])
def test_a_missing_field_differs_in_every_row(lacking):
    both = [{"logits": torch.zeros(2, 3)}, {"logits": torch.zeros(2, 3), "p": torch.zeros(2, 3)}]
    expected, got = both if lacking == "expected" else both[::-1]
    assert largest_difference(expected, got) == INF
    mismatch = first_difference(expected, got, own, FLOAT, 9.0)
    assert mismatch is not None
    assert (mismatch.field, mismatch.row) == ("p", 0)


def test_equal_outputs_have_no_first_difference():
    rows = [[1.0, NAN], [INF, -2.0]]
    assert first_difference(output(rows), output(rows), own, FLOAT) is None


@pytest.mark.parametrize(("width", "request_index"), [(1, 2), (2, 1), (3, 0)])
def test_the_first_row_is_reported_with_its_largest_difference(width, request_index):
    expected = torch.zeros(6, 4)
    got = expected.clone()
    got[2, 1], got[2, 3], got[5, 0] = 1.0, -3.0, 100.0
    mismatch = first_difference(
        {"logits": expected}, {"logits": got}, lambda row, rows: row * 6 // rows // width, FLOAT
    )
    assert mismatch is not None
    assert (mismatch.field, mismatch.row, mismatch.request) == ("logits", 2, request_index)
    assert (mismatch.expected, mismatch.got) == (0.0, -3.0)


def test_differences_within_the_allowed_ulp_are_ignored():
    expected, got = output([[1.0], [1.0]]), output([[1 + 2 * EPS], [1 + 4 * EPS]])
    assert first_difference(expected, got, own, FLOAT, 4.0) is None
    mismatch = first_difference(expected, got, own, FLOAT, 2.0)
    assert mismatch is not None
    assert (mismatch.row, mismatch.ulps, mismatch.distance) == (1, 4.0, "4 ulp of float32")


def test_any_difference_counts_if_none_is_allowed():
    one = torch.tensor([[1.0]])
    other = one.nextafter(torch.tensor(2.0))
    mismatch = first_difference({"a": one}, {"a": other}, own, FLOAT)
    assert mismatch is not None
    assert mismatch.ulps == 1.0


def test_fields_with_several_dimensions_are_compared():
    cube = torch.zeros(2, 2, 2)
    wrong = cube.clone()
    wrong[1, 1, 0] = 4
    mismatch = first_difference({"cube": cube}, {"cube": wrong}, own, FLOAT)
    assert mismatch is not None
    assert (mismatch.row, mismatch.got) == (1, 4.0)


@pytest.mark.parametrize("allowed", [0.0, 100.0])
def test_integers_must_be_equal_whatever_is_allowed(allowed):
    one, other = output([[5], [6]], torch.int64), output([[5], [7]], torch.int64)
    mismatch = first_difference(one, other, own, FLOAT, allowed)
    assert mismatch is not None
    assert (mismatch.row, mismatch.expected, mismatch.got) == (1, 6.0, 7.0)
    assert (mismatch.ulps, mismatch.distance) == (None, "")


def test_a_field_of_one_value_per_row_is_compared():
    mismatch = first_difference(
        {"tokens": torch.tensor([1, 2])}, {"tokens": torch.tensor([1, 3])}, own, FLOAT
    )
    assert mismatch is not None
    assert mismatch.row == 1


def test_a_difference_that_is_not_finite_has_no_distance():
    mismatch = first_difference(output([[1.0]]), output([[NAN]]), own, FLOAT, 1e9)
    assert mismatch is not None
    assert (mismatch.ulps, mismatch.distance) == (INF, "")


def test_the_largest_difference_in_ulp_is_over_all_fields():
    one = {"logits": torch.tensor([[64.0]]), "hidden": torch.tensor([[1.0]])}
    other = {"logits": torch.tensor([[64.0 + 128 * EPS]]), "hidden": torch.tensor([[1 + 3 * EPS]])}
    assert largest_ulps(one, other, FLOAT) == 3.0
    tokens = ({"tokens": torch.tensor([[number]])} for number in (1, 9))
    assert largest_ulps(next(tokens), next(tokens), FLOAT) == 0.0


def test_relative_and_absolute_differences_add_up():
    expected, got = output([[10.0], [-10.0], [INF]]), output([[11.5], [-11.6], [INF]])
    assert first_difference(expected, got, own, FLOAT, allowed_by(0.1, 0.7)) is None
    mismatch = first_difference(expected, got, own, FLOAT, allowed_by(0.1, 0.55))
    assert (mismatch.row, mismatch.request) == (1, 1)
    wrong = output([[11.5], [-11.6], [0.0]])
    assert first_difference(expected, wrong, own, FLOAT, allowed_by(1.0, 1.0))


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0.25, 0.5), ("0.25", "0.5")),
        ((0.3091950, 0.30919501), ("0.309195", "0.30919501")),
        ((1.0, 1.0 + 2**-52), ("1", "1.0000000000000002")),
        ((0.1, 0.1), ("0.1", "0.1")),
        ((NAN, NAN), ("nan", "nan")),
    ],
)
def test_numbers_that_differ_are_printed_differently(numbers, texts):
    assert distinct_text(*numbers) == texts


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_the_whole_tensors(dtype, monkeypatch):
    monkeypatch.setattr("graphkit.models.wrapper.model_logits._REDUCED_AT_ONCE", 64)
    expected = torch.randn(13, 30, generator=torch.Generator().manual_seed(0))
    got = (expected + torch.linspace(0, 1e-2, 13)[:, None]).to(dtype)
    found = RowDifferences.of(expected, got)
    one, other = {"x": expected.to(dtype)}, {"x": got}
    rounding = Rounding(dtype)
    assert float(found.largest.max()) == largest_difference(one, other)
    assert found.ulps(rounding) == largest_ulps(one, other, rounding)
    for ulps in (0.0, 2.0, 3e4):
        wrong = first_difference(one, other, lambda row, _: row, rounding, ulps)
        assert found.first_beyond(ulps, rounding) == (None if wrong is None else wrong.row)
    assert torch.equal(found.token, got.argmax(1))
    assert torch.equal(found.expected_token, one["x"].argmax(1))


def test_numbers_that_are_not_finite():
    expected = torch.tensor([[NAN, 1.0], [INF, 2.0], [-INF, 3.0], [1.0, 4.0], [INF, 0.0]])
    got = torch.tensor([[NAN, 1.5], [INF, 2.0], [INF, 3.0], [NAN, 4.0], [1.0, 0.0]])
    found = RowDifferences.of(expected, got)
    assert found.largest.tolist() == [0.5, 0.0, INF, INF, INF]
    assert found.scale.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert found.first_beyond(1e9, FLOAT) == 2


@pytest.mark.parametrize(
    ("hidden_size", "vocab_size", "rows"),
    [(64, 128, MOST_ROWS), (64, 10**6, 8), (768, 32_000, 32), (4096, 128_256, 128)],
)
def test_the_logits_at_once_are_a_part_of_the_head(hidden_size, vocab_size, rows):
    sizes = BufferSizes(2, 256, hidden_size, vocab_size, torch.float32)
    assert rows_at_once(sizes) == rows
