"""``graphkit audit``: its report, its lock files and its exit codes."""

from __future__ import annotations

import importlib
import itertools

import pytest

from graphkit.records import AuditReport, GraphBaseline

SOURCE = """
import numpy as np
import torch
from torch import nn
import graphkit as gk

MODE = gk.ForwardMode.TARGET_VERIFY
torch.manual_seed(0)
model = nn.Embedding(32, 32)
settings = {"scale": 2.0}

def score(i):
    rows = (i.req_pool_indices + i.seq_lens).repeat_interleave(4, output_size=i.num_tokens)
    return model(i.input_ids) + (rows + i.positions + i.out_cache_loc)[:, None] * 0.0

def sample_batch(mode, batch_size, seed):
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, batch_size + 1),
        seq_lens=np.full(batch_size, 4, np.int32),
        input_ids=np.random.default_rng(seed).integers(0, 32, 4 * batch_size),
        positions=np.arange(4 * batch_size) % 4 + 4,
        out_cache_loc=np.arange(1, 4 * batch_size + 1),
    )

def target(forward, largest=2, **options):
    return gk.CaptureTarget(
        name="small",
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4),
        sizes=gk.BufferSizes(largest, 128, 16, 32, torch.float32),
        forwards={MODE: lambda i: gk.ForwardOutput(next_token_logits=forward(i))},
        sample_batch=sample_batch, weights=model, **options)

sound = target(score)
single = target(score, largest=1)
frozen = target(
    lambda i: score(i) * settings["scale"],
    host_values={"scale": (lambda value: settings.update(scale=value), [2.0, 3.0])})
unread = target(lambda i: model(i.input_ids))
def changes(i):
    return score(i).relu() if settings["scale"] == 2.0 else score(i).sigmoid()
changing = target(changes)
nan = target(lambda i: score(i) * float("nan"))
"""
QUICK = "--only", "frozen,pointers"
names = (f"graphkit_tests_cli_audit_{number}" for number in itertools.count())


@pytest.fixture
def small(tmp_path, here, monkeypatch):
    """Write a module with targets and return its name."""
    name = next(names)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return name


def test_a_sound_target_has_no_finding(run, small):
    ended = run("audit", f"{small}:sound", *QUICK)
    assert ended.code == 0
    assert "captured again: 0 differences" in ended.out
    assert ended.out.rstrip().endswith("checks, no finding.")
    assert not ended.messages


def test_an_error_is_printed_with_its_advice_and_exits_with_1(run, small):
    ended = run("audit", f"{small}:frozen", *QUICK)
    assert ended.code == 1
    assert "error: frozen value: TARGET_VERIFY" in ended.out
    assert "follows `scale` (2.0, then 3.0): the graph captured" in " ".join(ended.out.split())
    assert "made by (forward)" in ended.out
    assert "Read it from a tensor" in " ".join(ended.out.split())
    assert "TARGET_VERIFY 1, 2: " in ended.out
    assert ended.out.rstrip().endswith(": 1 error.")


def test_a_finding_that_is_no_error_exits_with_0(run, small):
    ended = run("audit", f"{small}:unread", "--only", "pointers")
    assert ended.code == 0
    assert "warning: dead input" in ended.out


def test_json_is_the_report(run, small):
    ended = run("audit", f"{small}:frozen", *QUICK, "--json", "--batch-sizes", "2")
    assert ended.code == 1
    report = AuditReport.from_json(ended.out)
    assert {finding.kind for finding in report.findings} == {"frozen value"}
    assert {finding.batch_size for finding in report.findings} == {2}


def test_out_writes_the_report_and_names_the_file(run, small, here):
    ended = run("audit", f"{small}:sound", *QUICK, "--out", "audit.json")
    assert ended.messages == ["wrote audit.json"]
    assert not AuditReport.load(here / "audit.json").findings


def test_two_runs_give_the_same_report(run, small):
    first, second = (run("audit", f"{small}:frozen", *QUICK, "--json") for _ in range(2))
    reports = [AuditReport.from_json(ended.out) for ended in (first, second)]
    assert reports[0].findings == reports[1].findings
    assert [c.text for c in reports[0].checks] == [c.text for c in reports[1].checks]


def test_a_lock_is_written_and_holds(run, small, here):
    ended = run("audit", f"{small}:sound", "--lock", "graphs.lock.json")
    assert (ended.code, ended.out) == (0, "")
    assert ended.messages == ["locked 2 graphs: wrote graphs.lock.json"]
    assert set(GraphBaseline.load(here / "graphs.lock.json").fingerprints) == {
        "TARGET_VERIFY 1", "TARGET_VERIFY 2",
    }  # fmt: skip
    ended = run("audit", f"{small}:sound", "--check", "graphs.lock.json")
    assert ended.code == 0
    assert ended.out.count("as locked") == 2


def test_a_lock_of_one_graph_is_counted_in_the_singular(run, small):
    ended = run("audit", f"{small}:single", "--lock", "graphs.lock.json")
    assert ended.err.splitlines() == [
        "capturing TARGET_VERIFY of small on cpu: 1 size, up to 1 request",
        "locked 1 graph: wrote graphs.lock.json",
    ]


def test_a_changed_graph_is_an_error_of_a_check(run, small, here):
    run("audit", f"{small}:changing", "--lock", "graphs.lock.json")
    importlib.import_module(small).settings["scale"] = 3.0
    ended = run("audit", f"{small}:changing", "--check", "graphs.lock.json")
    assert ended.code == 1
    assert "graph changed" in ended.out
    assert "relu" in ended.out
    assert "sigmoid" in ended.out


@pytest.mark.slow
def test_a_check_of_one_mode_does_not_miss_the_others(run, small, here):
    run("audit", "graphkit.models.reference:reference_target", "--lock", "all.json",
        "--batch-sizes", "1", "--mode", "DECODE", "--mode", "DRAFT_EXTEND_V2")  # fmt: skip
    ended = run("audit", "graphkit.models.reference:reference_target", "--check", "all.json",
                "--batch-sizes", "1", "--mode", "DRAFT_EXTEND_V2")  # fmt: skip
    assert ended.code == 0, ended.out
    assert "is gone" not in ended.out


def test_output_that_is_not_finite_fails_audit_and_capture(run, small):
    ended = run("audit", f"{small}:nan", "--only", "finite")
    assert ended.code == 1
    assert "error: not finite output: TARGET_VERIFY 1, 2: row 0" in " ".join(ended.out.split())
    ended = run("capture", f"{small}:nan")
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert "the output is not finite, with and without the graph: next_token_logits row 0" in text
    assert "nan instead of nan" not in text
