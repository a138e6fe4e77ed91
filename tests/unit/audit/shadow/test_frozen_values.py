"""The watch names host numbers that have changed since capture and that a graph keeps."""

from __future__ import annotations

import pytest

import graphkit as gk
from graphkit.audit import AuditLog
from graphkit.audit.shadow.watch import audit_shadow

VERIFY = gk.ForwardMode.TARGET_VERIFY


def test_a_number_that_has_changed_is_an_error_with_its_path(capture, batch_of, watched, scaled):
    runner, model = capture(scaled)
    model.scale = 0.5
    (finding,) = watched(runner, [batch_of(3), batch_of(4)], bisect=True).findings
    facts = finding.audit, finding.kind, finding.severity, finding.batch_size
    assert facts == ("shadow", "frozen value", "error", 4)
    assert finding.text == (
        "`Tiny.scale` has changed since capture (1.0, then 0.5), and the graph keeps its value in "
        f"argument 1 of `mul` (node {finding.node})."
    )
    assert (finding.names, finding.before, finding.after) == (("Tiny.scale",), "1.0", "0.5")
    assert finding.source.endswith("in scaled")
    assert model.scale == 0.5


def test_a_number_that_no_graph_keeps_may_change(capture, batch_of, watched, scaled):
    runner, model = capture(scaled)
    model.steps = 1000
    captures = []
    count = runner.recapture
    runner.recapture = lambda **options: captures.append(options) or count(**options)
    for _ in range(2):
        model.steps += 1
        assert watched(runner, [batch_of(3)], bisect=True).findings == []
    assert len(captures) == 3  # twice with the old and once with the new value, the first time
    assert model.steps == 1002


def test_a_number_that_has_its_value_of_capture_again_is_no_error(
    capture, batch_of, watched, scaled
):
    runner, model = capture(scaled)
    model.scale = 0.5
    assert watched(runner, [batch_of(3)], bisect=True).findings
    model.scale = 1.0
    assert watched(runner, [batch_of(3)], bisect=True).findings == []


def test_the_length_of_a_list(target_of, tiny, batch_of, watched):
    model = tiny(lambda model, hidden, inputs: hidden * len(model.adapters))
    model.adapters = ["one"]
    with target_of(model).runner(VERIFY, device="cpu") as runner:
        runner.capture()
        model.adapters.append("two")
        (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    assert finding.text.startswith("`len(Tiny.adapters)` has changed since capture (1, then 2)")
    assert model.adapters == ["one", "two"]


def test_the_scheduler_that_changes_a_number_is_found_by_the_audit(tiny, target_of, scaled):
    """Sample batches stand for the scheduler, which here sets a temperature per batch."""
    model = tiny(scaled)
    plain = target_of(model)

    def sample_batch(mode, batch_size, seed):
        model.scale = 1.0 if batch_size == 1 else 0.5
        return plain.sample_batch(mode, batch_size, seed)

    target, log = target_of(model, sample_batch=sample_batch), AuditLog()
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        audit_shadow(target, runner, log)
    assert {(each.kind, each.severity, each.names) for each in log.findings} == {
        ("frozen value", "error", ("Tiny.scale",))
    }


@pytest.mark.parametrize("value", [None, 2, "warm"])
def test_a_number_that_is_none_any_more(capture, batch_of, watched, scaled, value):
    """A forward that does not run with the new value has no graph to compare."""
    runner, model = capture(scaled)
    model.scale = value
    (finding,) = watched(runner, [batch_of(3)], bisect=True).findings
    kind = "frozen value" if value == 2 else "shadow failed"
    assert finding.kind == kind


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_weight_that_each_call_reassigns_keeps_no_number(capture, batch_of, watched, is_kept):
    def mix(model, hidden, _inputs):
        model.head.weight.data = model.head.weight.data * 1.0001
        return hidden * (model.scale if is_kept else 1.0)

    runner, model = capture(mix)
    model.scale = 0.5
    findings = watched(runner, [batch_of(3)], bisect=True).findings
    frozen = [each for each in findings if each.kind == "frozen value"]
    assert [each.names for each in frozen] == [("Tiny.scale",)] * is_kept
