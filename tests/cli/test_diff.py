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


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[1, 2]", b'{"kind": "capture", "schema": 99}', b"\xff\x00", b"\x89PNG"],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_that_is_no_record_is_refused_on_one_line(run, saved, here, content, is_first):
    if content is not None:
        (here / "odd.json").write_bytes(content)
    ended = run("diff", *(("odd.json", saved) if is_first else (saved, "odd.json")))
    assert (ended.code, ended.out) == (1, "")
    assert "record" in ended.error


def test_a_record_without_graphs_is_refused_on_one_line(run, saved, here):
    (here / "diff.json").write_text(run("diff", saved, saved, "--json").out)
    ended = run("diff", "diff.json", saved)
    assert (ended.code, ended.out) == (1, "")
    assert "of kind 'diff'" in ended.error
