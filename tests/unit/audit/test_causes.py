"""Tests of the merge of findings that share a cause."""

from __future__ import annotations

from graphkit.audit.causes import REPLACED_MEMORY, merged_by_cause
from graphkit.records import Finding


def finding(**facts):
    defaults = {
        "audit": "pads",
        "kind": "leak",
        "mode": "DECODE",
        "batch_size": 2,
        "text": "row 0.",
    }
    return Finding(**defaults | facts)


def test_findings_that_differ_in_numbers_are_one_with_all_modes_and_sizes():
    found = [
        finding(batch_size=8, text="row 3 of 8."),
        finding(batch_size=2, text="row 0 of 1."),
        finding(mode="DRAFT", batch_size=4, text="row 1 of 4."),
    ]
    (merged,) = merged_by_cause(found)
    assert (merged.mode, merged.batch_size, merged.text) == ("DECODE", 8, "row 3 of 8.")
    assert (merged.modes, merged.batch_sizes) == (("DECODE", "DRAFT"), (2, 4, 8))


def test_causes_of_an_audit_stay_apart():
    found = [finding(), finding(text="column."), finding(source="a.py:3"), finding(cause="c")]
    assert len(merged_by_cause(found)) == 4


def test_a_given_cause_merges_different_texts_and_unites_names():
    found = [finding(text="a.", cause="c", names=("x", "y")), finding(cause="c", names=("y", "z"))]
    (merged,) = merged_by_cause(found)
    assert (merged.text, merged.names) == ("a.", ("x", "y", "z"))


def test_rounding_that_pads_and_shadow_see_is_one_note():
    both = [
        finding(audit=audit, kind="nondeterministic rounding", severity="note")
        for audit in ("pads", "shadow")
    ]
    assert [each.audit for each in merged_by_cause(both)] == ["pads"]
    assert len(merged_by_cause([finding(kind="other", severity="note"), both[1]])) == 2


def test_errors_come_first_and_notes_last():
    found = [
        finding(text=text, severity=severity)
        for text, severity in [("a", "note"), ("b", "warning"), ("c", "error"), ("d", "error")]
    ]
    assert [each.text for each in merged_by_cause(found)] == ["c", "d", "b", "a"]


def test_what_pads_has_found_is_not_found_again_by_shadow():
    shadow = finding(audit="shadow", text="row 1 differs.")
    assert [each.audit for each in merged_by_cause([finding(), shadow])] == ["pads"]
    assert len(merged_by_cause([finding(mode="DRAFT"), shadow])) == 2
    assert len(merged_by_cause([finding(kind="order"), shadow])) == 2
    line = {"source": "a.py:3", "kernel": "mean"}
    at_one_line = [finding(kind="order", **line), finding(audit="shadow", **line)]
    assert [each.audit for each in merged_by_cause(at_one_line)] == ["pads"]
    at_one_line[0] = finding(kind="order", severity="note", **line)
    assert len(merged_by_cause(at_one_line)) == 2


def test_a_cache_that_warmup_has_found_is_not_found_again():
    cache = [
        finding(audit=audit, kind="lazy cache", names=names)
        for audit, names in (("warmup", ("x", "y")), ("pads", ("x",)), ("shadow", ("z",)))
    ]
    assert [each.audit for each in merged_by_cause(cache)] == ["warmup", "shadow"]


def test_state_and_statistics_that_a_capture_changes_are_no_leak():
    leak = finding(audit="warmup", kind="warm-up leak", names=("norm.mean",))
    state = finding(audit="warmup", kind="undeclared state", names=("norm.mean",))
    assert [each.kind for each in merged_by_cause([leak, state])] == ["undeclared state"]
    assert [each.kind for each in merged_by_cause([leak, finding(module="norm")])] == ["leak"]
    assert len(merged_by_cause([leak, finding(module="other")])) == 2


def test_replays_that_start_from_what_the_last_one_left_are_a_leak():
    leak = finding(audit="warmup", kind="warm-up leak", names=("norm.count",))
    replays = finding(kind="nondeterministic step", severity="error", module="norm")
    assert [each.kind for each in merged_by_cause([leak, replays])] == ["warm-up leak"]
    elsewhere = finding(kind="nondeterministic step", severity="error", module="other")
    assert len(merged_by_cause([leak, elsewhere])) == 2


def differing(cause):
    """Return findings of captures that differ at three sizes."""
    kind = "capture is not deterministic"
    return [
        finding(audit="frozen", kind=kind, cause=cause, batch_size=size, text=f"in {size} of mul.")
        for size in (1, 4, 8)
    ]


def test_captures_that_differ_in_memory_are_one_finding_and_none_beside_a_replaced_buffer():
    found = differing(REPLACED_MEMORY)
    (merged,) = merged_by_cause(found)
    assert merged.batch_sizes == (1, 4, 8)
    replaced = finding(audit="warmup", kind="replaced buffer")
    assert [each.kind for each in merged_by_cause([*found, replaced])] == ["replaced buffer"]
    elsewhere = finding(audit="pointers", kind="freed memory", mode="DRAFT")
    assert len(merged_by_cause([*found, elsewhere])) == 2


def test_captures_that_differ_in_more_than_memory_stay_beside_a_replaced_buffer():
    replaced = finding(audit="warmup", kind="replaced buffer")
    assert len(merged_by_cause([*differing("capture is not deterministic"), replaced])) == 2


def test_a_list_with_tensors_that_each_call_leaves_is_no_leak_of_its_own():
    leak = finding(audit="warmup", kind="warm-up leak", names=("Model.aux",))
    left = finding(audit="warmup", kind="side output", names=("Model.aux[0]", "Model.aux[1]"))
    assert [each.kind for each in merged_by_cause([leak, left])] == ["side output"]
    other = finding(audit="warmup", kind="warm-up leak", names=("Model.steps",))
    assert len(merged_by_cause([other, left])) == 2
