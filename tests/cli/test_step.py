"""``graphkit`` commands on a target with an engine: its whole step is the mode STEP."""

from __future__ import annotations

import json

import pytest

import graphkit as gk
from engine_target import right
from graphkit.records import CaptureRecord


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a record of STEP."""
    path = tmp_path_factory.mktemp("step") / "step.json"
    path.write_text(gk.capture_target(right, device="cpu", inspect=True).to_json())
    return path


def words(text):
    return " ".join(text.split())


def test_the_step_is_captured_and_checked(run):
    ended = run("capture", "engine_target:right", "--mode", "Step", "--batch-sizes", "2")
    assert ended.code == 0
    assert ended.err.startswith("capturing STEP of table on cpu: 2 sizes, up to 3 requests")
    assert "WHILE again" in ended.out
    assert "STEP: 5 live batches replayed: each equals the padded step" in words(ended.out)
    assert "in one launch, as in single replays" in words(ended.out)


def test_a_wrong_step_fails(run):
    ended = run("capture", "engine_target:counting", "--batch-sizes", "3")
    assert ended.code == 1
    text = words(ended.out)
    assert "at size 3: the graph differs from the same padded path without it: report row" in text
    assert "a launch of several steps differs from single replays: report of step " in text


def test_an_engine_without_a_whole_step_says_why(run):
    ended = run("capture", "engine_target:host_in_loop")
    assert ended.code == 0
    assert "stays eager: the engine runs generation v1, as requested" in ended.out


def test_the_record_is_shown_exported_and_compared(run, saved, here):
    shown = run("inspect", saved, "--mode", "step", "--batch-size", "3").out
    lines = [line.split()[:2] for line in shown.splitlines()]
    assert ["greedy", "loop"] in lines
    assert [line[0] for line in lines if line[1:] and line[0] in ("SWITCH", "WHILE")] == [
        "WHILE", "SWITCH", "WHILE", "SWITCH",
    ]  # fmt: skip
    phases = shown[shown.index("\nSTEP 3\n") :]
    for phase in ("draft", "build", "verify", "accept", "extend"):
        assert f"\n{phase} " in phases
    assert "\nSTEP 1\n" not in shown
    for suffix in ("html", "svg", "trace.json"):
        assert run("export", saved, "--mode", "step", "--out", f"step.{suffix}").code == 0
    assert json.loads((here / "step.trace.json").read_text())
    assert run("diff", saved, saved).code == 0


def test_a_record_of_an_older_graphkit_has_no_loops(saved):
    body = json.loads(saved.read_text())
    assert [loop["kind"] for loop in body["modes"][0].pop("loops")] == ["greedy", "sampled"]
    assert CaptureRecord.from_json(json.dumps(body)).modes[0].loops == ()


def test_an_audit_runs_the_loop_and_says_what_it_does_not_run(run):
    ended = run("audit", "engine_target:right", "--only", "pads,loop", "--mode", "step")
    assert ended.code == 0
    text = words(ended.out)
    assert "not checked: STEP is the whole step of the engine" in text
    assert "steps in one launch: no difference" in text
    assert "2 checks, no finding." in text


def test_an_audit_finds_a_value_that_a_loop_keeps(run):
    ended = run("audit", "engine_target:counting", "--only", "loop")
    assert ended.code == 1
    assert "error: frozen value: STEP: After step " in words(ended.out)
    assert "Counting.calls" in ended.out


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("engine_target:host_in_loop", "not checked: the engine runs generation v1, as requested"),
        ("{}:right", "not checked: the target declares no engine"),
    ],
)
def test_an_audit_of_loops_says_why_there_is_none(run, tiny, target, reason):
    ended = run("audit", target.format(tiny), "--only", "loop")
    assert ended.code == 3
    assert ended.messages[-1] == "error: nothing audited: no check could be made"
    assert reason in words(ended.out)


def test_an_audit_of_forwards_captures_no_step(run, monkeypatch):
    def no_engine(*_, **__):
        raise AssertionError("an engine was created")

    monkeypatch.setattr("graphkit.audit.report.open_step", no_engine)
    ended = run("audit", "engine_target:right", "--only", "frozen")
    assert "not checked: STEP is the whole step" in words(ended.out)


def test_the_graphs_of_a_step_can_be_locked(run, here):
    assert run("audit", "engine_target:right", "--lock", "l.json", "--batch-sizes", "3").code == 0
    ended = run("audit", "engine_target:right", "--check", "l.json", "--batch-sizes", "3")
    assert (ended.code, ended.out.count("as locked")) == (0, 1)


def test_other_commands_name_the_engine(run):
    ended = run("audit", "engine_target:right", "--only", "misses", "--mode", "decode")
    assert ended.code == 2
    assert "target 'table' has no forward for DECODE; it has STEP." in ended.error
