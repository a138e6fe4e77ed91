"""The shadow audit finds nothing in sound models, and reports findings by size."""

from __future__ import annotations

import pytest

import graphkit as gk
from declared_modes import every_mode
from graphkit.audit import AuditLog
from graphkit.audit.shadow import audit_shadow
from small_targets import llama_target

VERIFY = gk.ForwardMode.TARGET_VERIFY
GRAPH = "graph bug"


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@every_mode
def test_real_models_have_no_finding_in_any_mode(mode, topk, capture):
    target = llama_target(topk=topk, max_batch_size=3)
    log = AuditLog()
    with target.runner(mode, batch_sizes=[1, 3], device="cpu") as runner:
        runner.capture()
        audit_shadow(target, runner, log)
    assert log.findings == []
    assert [(check.batch_size, check.text) for check in log.checks] == [
        (1, "compared 1 request with the padded and the unpadded step"),
        (3, "compared 1 to 3 requests with the padded and the unpadded step"),
    ]


def test_the_audit_reports_by_size_and_restores_state(capture, target_of, storing, tiny):
    model = tiny(lambda model, hidden, inputs: storing(model, hidden, inputs) * model.scale)
    target, log = target_of(model), AuditLog()
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        model.scale = 2.0
        audit_shadow(target, runner, log)
    assert [(f.kind, f.batch_size, f.kernel) for f in log.findings] == [
        ("frozen value", 1, "mul"), ("frozen value", 4, "mul"),
    ]  # fmt: skip
    assert [check.findings for check in log.checks] == [1, 1]
    assert not model.cache.any()
