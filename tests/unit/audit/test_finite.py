"""Tests of the search for outputs that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphkit.audit import audit_target
from graphkit.audit.locate_target import locate

ROOT = Path(__file__).parents[3]


@pytest.fixture
def target(monkeypatch):
    """Return a correct target."""
    monkeypatch.chdir(ROOT)
    return locate("tools.examples.broken.sound:target", "cpu")


def test_nan_is_one_error_that_names_the_first_module(target):
    target.weights.norm.weight[3] = torch.nan
    (finding,) = audit_target(target, device="cpu", only=["finite"]).findings
    assert (finding.severity, finding.kind) == ("error", "not finite output")
    assert (finding.modes, finding.batch_sizes) == (("TARGET_VERIFY",), (2, 8))
    assert (finding.row, finding.request, finding.module) == (0, 0, "norm")
    assert finding.text == (
        f"row 0 of {finding.field} (request 0 of 2) has nan instead of a finite number, first in "
        "the output of module `norm`."
    )


def test_a_mask_of_minus_infinity_is_no_finding(target):
    target.weights.head.bias[3] = -torch.inf
    assert not audit_target(target, device="cpu", only=["finite"]).findings
