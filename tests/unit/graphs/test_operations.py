"""Bytes of the tensors of an operation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit.graphs.operations import distinct_bytes, operands_in

X = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (X, 128),
        (X.t(), 128),
        (X[:, :2], 64),
        (X[2:4], 32),
        (X[0].expand(8, 4), 16),
        (X[:0], 0),
        (torch.tensor(1.0, dtype=torch.float64), 8),
    ],
)
def test_gaps_and_repeated_elements_do_not_count(tensor, size):
    assert distinct_bytes(tensor) == size


def test_tensors_are_found_at_any_depth_in_order():
    weight = nn.Parameter(torch.zeros(2))
    sparse = torch.eye(2).to_sparse()
    values = ((X, [weight, 3]), {"out": X[1]}, None, sparse)
    assert list(operands_in(values)) == [
        (X.data_ptr(), 128), (weight.data_ptr(), 8), (X.data_ptr() + 16, 16),
    ]  # fmt: skip
