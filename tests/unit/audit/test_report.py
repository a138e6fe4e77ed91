"""Reports of audits: their sizes, outputs that are not finite, and several ranks as one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import graphkit as gk
from declared_modes import every_mode
from graphkit.audit import audit_target, merged_reports
from graphkit.audit.locate_target import locate
from graphkit.audit.report import representative_sizes
from graphkit.errors import TargetError
from graphkit.models.reference import reference_target
from graphkit.records import AuditReport, Environment, Finding
from small_targets import llama_target
from tiny_target import small_target

ROOT = Path(__file__).parents[3]
ENVIRONMENT = Environment(device="d", torch="2", triton="3", cuda="", driver="", graphkit="0")


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


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@every_mode
def test_real_models_have_no_finding_in_any_mode(mode, topk):
    target = llama_target(topk=topk, max_batch_size=3)
    audits = ["warmup", "pool-poison", "pads", "shadow"]
    report = audit_target(target, only=audits, modes=[mode], batch_sizes=[1, 3], device="cpu")
    assert report.findings == ()
    assert {check.mode for check in report.checks} == {mode.name}
    texts: dict[str, list[str]] = {}
    for check in report.checks:
        texts.setdefault(check.audit, []).append(re.sub(r"[\d,]{2,}", "N", check.text))
    replays = "replays of batches of", "varied pads, order and previous batches"
    assert texts == {
        "warmup": ["compared N values before and after capture: 0 changes"],
        "pool-poison": ["overwrote N bytes of the graph pool between replays"] * 2,
        "pads": [f"7 {replays[0]} 1 request: {replays[1]}",
                 f"N {replays[0]} 1 to 3 requests: {replays[1]}"],
        "shadow": [f"compared {requests} with the padded and the unpadded step"
                   for requests in ("1 request", "1 to 3 requests")],
    }  # fmt: skip


def test_the_checking_mode_refuses_nothing_that_an_audit_feeds(monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    target = reference_target()
    draft = gk.ForwardMode.DRAFT_EXTEND  # its inputs have floating-point rows, which become NaN
    report = gk.audit_target(target, only=["pads"], modes=[draft], batch_sizes=[2], device="cpu")
    assert report.findings == ()
    assert "replays" in report.checks[0].text


@pytest.fixture
def target(monkeypatch):
    """Return a correct target."""
    monkeypatch.chdir(ROOT)
    return locate("tools.examples.broken.sound:target", "cpu")


def test_a_runner_is_refused_with_what_to_pass(target):
    with pytest.raises(TargetError, match="To audit a runner, pass a CaptureTarget of its spec"):
        audit_target(target.runner(gk.ForwardMode.TARGET_VERIFY, device="cpu"))


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


def report(*findings):
    made = tuple(
        Finding(audit="pads", kind=kind, severity=severity, text=text, modes=("DECODE",))
        for kind, severity, text in findings
    )
    return AuditReport(
        target="t", backend="recorder", environment=ENVIRONMENT, checks=(), findings=made
    )


def texts(*reports):
    return [(each.severity, each.text) for each in merged_reports(reports).findings]


def test_a_finding_of_all_ranks_is_reported_once():
    leak = ("leak", "error", "row 0 leaks")
    assert texts(report(leak), report(("leak", "error", "row 3 leaks"))) == [leak[1:]]


def test_findings_of_other_ranks_name_their_rank_and_come_by_severity():
    assert texts(
        report(("waste", "note", "pads")),
        report(("leak", "error", "row 0 leaks"), ("waste", "note", "pads")),
        report(("leak", "error", "row 1 leaks"), ("stale", "warning", "old rows")),
    ) == [
        ("error", "rank 1: row 0 leaks"), ("warning", "rank 2: old rows"), ("note", "pads"),
    ]  # fmt: skip


def test_the_modes_of_a_finding_stay():
    merged = merged_reports([report(("leak", "error", "row 0 leaks")), report()])
    assert merged == report(("leak", "error", "row 0 leaks"))
