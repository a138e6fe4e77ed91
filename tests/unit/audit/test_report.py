"""Tests of the sizes that audits capture."""

from __future__ import annotations

import pytest

import graphkit as gk
from graphkit.audit.report import representative_sizes
from graphkit.models.reference import reference_target
from tiny_target import small_target


@pytest.mark.parametrize(
    ("largest", "batch_sizes", "expected"),
    [
        (1, None, [1]),
        (8, None, [1, 8]),
        (64, None, [1, 8, 64]),
        (8, [2, 4], [2, 8]),
        (64, [4, 16, 32], [4, 16, 64]),
    ],
)
def test_representative_sizes_belong_to_the_target(largest, batch_sizes, expected):
    target = small_target(print, requests=largest, batch_sizes=batch_sizes)
    assert representative_sizes(target) == expected


def test_the_checking_mode_refuses_nothing_that_an_audit_feeds(monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    target = reference_target()
    draft = gk.ForwardMode.DRAFT_EXTEND  # its inputs have floating-point rows, which become NaN
    report = gk.audit_target(target, only=["pads"], modes=[draft], batch_sizes=[2], device="cpu")
    assert report.findings == ()
    assert "replays" in report.checks[0].text
