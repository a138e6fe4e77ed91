"""``graphkit diff``: a difference is a result, an unreadable record is a failure."""

from __future__ import annotations

import json

import pytest

from graphkit.records import DiffRecord


@pytest.fixture
def changed(saved, here):
    """Save the record with a different driver, a larger pool and without one size."""
    body = json.loads(saved.read_text())
    body["environment"]["driver"] = "590"
    body["modes"][0]["sizes"][0]["pool_bytes"] += 4096
    del body["modes"][1]["sizes"][1]
    (here / "changed.json").write_text(json.dumps(body))
    return here / "changed.json"


def test_a_record_equals_itself(run, saved):
    ended = run("diff", saved, saved)
    assert (ended.code, ended.err) == (0, "")
    assert "->" not in ended.out
    assert "no changed figure\n" in ended.out


def test_a_difference_is_printed_and_is_no_failure(run, saved, changed):
    ended = run("diff", saved, changed)
    assert (ended.code, ended.err) == (0, "")
    assert "none -> 590" in ended.out
    assert "pool bytes" in ended.out
    assert "only before  DECODE 2" in ended.out
    assert "\x1b" not in ended.out


def test_json_is_the_diff_record(run, saved, changed):
    ended = run("diff", changed, saved, "--json")
    assert (ended.code, ended.err) == (0, "")
    diff = DiffRecord.from_json(ended.out)
    assert diff.only_after == ("DECODE 2",)
    assert [change.field for change in diff.environment] == ["driver"]


def of_backend(path, backend):
    """Let a saved record be of a backend, and return its body."""
    body = json.loads(path.read_text()) | {"backend": backend}
    path.write_text(json.dumps(body))
    return body


@pytest.fixture
def slower(saved, here):
    """Save the record with a replay that takes 4 % longer, and twice the time of capture."""
    body = of_backend(saved, "cuda")
    size = body["modes"][0]["sizes"][0]
    size |= {"replay_us": 1.04 * size["replay_us"], "capture_ms": 2 * size["capture_ms"]}
    (here / "slower.json").write_text(json.dumps(body))
    return here / "slower.json"


def test_figures_below_the_threshold_are_left_out(run, saved, slower):
    assert "replay us" in run("diff", saved, slower, "--threshold", "3.9%").out
    shown = run("diff", saved, slower, "--threshold", "4.1").out
    assert "replay us" not in shown
    assert "capture ms" in shown
    record = DiffRecord.from_json(run("diff", saved, slower, "--threshold", "5%", "--json").out)
    assert [figure.name for size in record.sizes for figure in size.figures] == ["capture_ms"]


def test_a_figure_that_got_worse_by_more_fails(run, saved, slower):
    ended = run("diff", saved, slower, "--fail-above", "3%", "--threshold", "50%")
    assert ended.code == 1
    assert ended.messages == ["worse: TARGET_VERIFY 1: replay us +4.0%"]
    assert "capture ms" in ended.out
    assert run("diff", saved, slower, "--fail-above", "5%").code == 0
    assert run("diff", slower, saved, "--fail-above", "0").code == 0, "it got better"


def test_a_figure_that_was_0_got_worse_by_more_than_any_limit(run, saved, here):
    body = json.loads(saved.read_text())
    sizes = [mode["sizes"][0] for mode in body["modes"]]
    sizes[0]["pool_bytes"], sizes[1]["pool_bytes"] = 0, 4096
    saved.write_text(json.dumps(body))
    sizes[0]["pool_bytes"], sizes[1]["pool_bytes"] = 8192, 0
    (here / "larger.json").write_text(json.dumps(body))
    ended = run("diff", saved, here / "larger.json", "--fail-above", "1000%")
    assert ended.code == 1
    assert ended.messages[-1] == "worse: TARGET_VERIFY 1: pool bytes 0 -> 8,192"


def test_records_without_a_common_size_do_not_pass(run, saved, here):
    body = json.loads(saved.read_text()) | {"graphs": []}
    for mode in body["modes"]:
        mode["mode"] = "DRAFT"
    (here / "other.json").write_text(json.dumps(body))
    ended = run("diff", saved, here / "other.json", "--fail-above", "5%")
    assert ended.code == 2
    assert "--fail-above compared nothing: no size and no graph of" in ended.err
    assert "only before  TARGET_VERIFY 1" in ended.out
    assert run("diff", saved, here / "other.json").code == 0


@pytest.mark.parametrize("recorded", ["before", "after"])
def test_times_of_the_recorder_decide_nothing(run, saved, slower, recorded):
    body = of_backend(saved if recorded == "before" else slower, "recorder")
    ended = run("diff", saved, slower, "--fail-above", "3%")
    assert ended.code == 0
    note = "times not compared: the recorder runs on the CPU and measures no GPU time"
    assert ended.messages == [note]
    assert "replay us" in ended.out
    if recorded == "after":
        body["modes"][0]["sizes"][0]["num_nodes"] *= 2
        slower.write_text(json.dumps(body))
        ended = run("diff", saved, slower, "--fail-above", "3%")
        assert (ended.code, len(ended.messages)) == (1, 2)
