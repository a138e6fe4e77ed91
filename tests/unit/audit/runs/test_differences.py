"""Differences between two outputs, and the one that is reported."""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.records import distinct_text
from graphkit.runners.comparison import Rounding, first_difference
from graphkit.runners.comparison.differences import allowed_by, largest_difference, largest_ulps

INF, NAN = math.inf, math.nan
FLOAT = Rounding(torch.float32)
EPS = torch.finfo(torch.float32).eps


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
