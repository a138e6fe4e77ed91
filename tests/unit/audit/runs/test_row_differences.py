"""Differences of logits, reduced to a few numbers per row."""

from __future__ import annotations

import math

import pytest
import torch

from graphkit.config import BufferSizes
from graphkit.models.wrapper.model_logits import MOST_ROWS, RowDifferences, rows_at_once
from graphkit.runners.comparison.differences import (
    Rounding,
    first_difference,
    largest_difference,
    largest_ulps,
)

FLOAT = Rounding(torch.float32)
NAN, INF = math.nan, math.inf


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
