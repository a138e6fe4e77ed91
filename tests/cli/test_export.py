"""``graphkit export``: a saved record as json or as a picture that loads nothing."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from graphkit.records import CaptureRecord

NAMESPACE = "http://www.w3.org/2000/svg"


def test_json_is_the_same_record(run, saved, here):
    assert run("export", saved, "--out", "copy.json").code == 0
    assert (here / "copy.json").read_text() == saved.read_text()
    assert CaptureRecord.load("copy.json").target == "tiny"


def test_a_record_may_be_exported_onto_itself(run, saved):
    before = saved.read_text()
    assert run("export", saved, "--out", saved).code == 0
    assert saved.read_text() == before


def test_svg_is_whole_and_shows_the_record(run, saved, here):
    ended = run("export", saved, "--out", "picture.svg")
    assert (ended.code, ended.out) == (0, "")
    root = ET.fromstring((here / "picture.svg").read_text())
    assert root.tag == f"{{{NAMESPACE}}}svg"
    shown = "".join(root.itertext()).replace("\xa0", " ")
    assert "graphkit capture: tiny" in shown
    assert "TARGET_VERIFY, 4 tokens per request" in shown
    assert "6 live batches replayed" in shown


def test_svg_loads_nothing_from_elsewhere(run, saved, here):
    assert run("export", saved, "--out", "picture.svg").code == 0
    text = re.sub(r"<!--.*?-->", "", (here / "picture.svg").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {NAMESPACE}
    assert "@font-face" not in text
    assert not re.search(r"url\((?!#)", text), "only links into the picture itself"


def test_svg_is_the_same_from_run_to_run(run, saved, here, monkeypatch):
    assert run("export", saved, "--out", "one.svg").code == 0
    for name, value in {"COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert run("export", saved, "--out", "two.svg").code == 0
    assert (here / "one.svg").read_bytes() == (here / "two.svg").read_bytes()


@pytest.mark.parametrize("name", ["a <b> & 'c'", "{braces} %s", "[bold]markup[/bold]", "日本語 ü"])
def test_svg_takes_any_name(run, saved, here, name):
    body = json.loads(saved.read_text())
    (here / "odd.json").write_text(json.dumps({**body, "target": name}))
    assert run("export", "odd.json", "--out", "odd.svg").code == 0
    root = ET.fromstring((here / "odd.svg").read_text(encoding="utf-8"))
    assert name in "".join(root.itertext()).replace("\xa0", " ")


@pytest.mark.parametrize("name", ["out.png", "out", "out.svg.gz", "out.html2"])
def test_a_form_that_does_not_exist_is_wrong_usage(run, saved, here, name):
    ended = run("export", saved, "--out", name)
    assert (ended.code, ended.out) == (2, "")
    assert "formats are .json" in ended.error
    assert not (here / name).exists()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[1, 2]", b'{"kind": "capture", "schema": 99}', b"\xff\x00", b"\x89PNG"],
)
@pytest.mark.parametrize("out", ["out.json", "out.svg"])
def test_what_is_no_record_is_refused_on_one_line(run, here, content, out):
    if content is not None:
        (here / "in.json").write_bytes(content)
    ended = run("export", "in.json", "--out", out)
    assert ended.code in (1, 2)
    assert ended.out == ""
    assert "record" in ended.error
    assert not (here / out).exists()


def test_a_record_with_wrong_types_is_refused_on_one_line(run, saved, here):
    body = json.loads(saved.read_text())
    body["modes"][0]["sizes"][0]["capture_ms"] = "fast"
    (here / "odd.json").write_text(json.dumps(body))
    ended = run("export", "odd.json", "--out", "odd.svg")
    assert ended.code in (1, 2)
    assert "record" in ended.error
