"""``graphkit export``: a saved record in every form, each of which loads nothing."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from graphkit.records import CaptureRecord

NAMESPACE = "http://www.w3.org/2000/svg"


def graph(environment, batch_size, kernel="gemm</script><b>"):
    node = {
        "index": 0,
        "kind": "kernel",
        "name": kernel,
        "short_name": kernel,
        "module": "layers.0",
    }
    return {
        "name": f"DECODE {batch_size}", "backend": "cuda", "environment": environment,
        "mode": "DECODE", "batch_size": batch_size, "nodes": [node],
    }  # fmt: skip


@pytest.fixture
def looked_into(saved):
    """The record of two modes, with the nodes of one of them at two sizes."""
    body = json.loads(saved.read_text())
    graphs = [graph(body["environment"], batch_size) for batch_size in (1, 2)]
    saved.write_text(json.dumps({**body, "graphs": graphs}))
    return saved


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


@pytest.mark.parametrize("name", ["out.png", "out", "out.svg.gz", "out.html2", "out.trace"])
def test_a_form_that_does_not_exist_is_wrong_usage(run, saved, here, name):
    ended = run("export", saved, "--out", name)
    assert (ended.code, ended.out) == (2, "")
    assert "formats are .json, .html, .svg, .dot, .trace.json." in ended.error
    assert not (here / name).exists()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[1, 2]", b'{"kind": "capture", "schema": 99}', b"\xff\x00", b"\x89PNG"],
)
@pytest.mark.parametrize("out", ["out.json", "out.svg", "out.html", "out.dot", "out.trace.json"])
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


@pytest.mark.parametrize(
    ("name", "begins", "holds"),
    [
        ("out.html", "<!doctype html>", "DECODE 2"),
        ("out.trace.json", '{"displayTimeUnit"', "DECODE 2 (not measured"),
        ("trace.json", '{"displayTimeUnit"', "DECODE 2 (not measured"),
        ("out.json", '{\n  "schema"', '"name": "DECODE 2"'),
        ("OUT.trace.html", "<!doctype html>", "DECODE 1"),
    ],
)
def test_the_suffix_names_the_form(run, looked_into, here, name, begins, holds):
    ended = run("export", looked_into, "--out", name)
    assert (ended.code, ended.out, ended.err) == (0, "", f"wrote {name}\n")
    text = (here / name).read_text()
    assert text.startswith(begins)
    assert holds in text


def test_html_takes_a_kernel_that_is_called_like_a_tag(run, looked_into, here):
    assert run("export", looked_into, "--out", "page.html").code == 0
    text = (here / "page.html").read_text()
    assert text.count("</script>") == 2, "those of the record and of the program"
    assert "gemm\\u003c/script>\\u003cb>" in text
    assert "gemm&lt;/script&gt;&lt;b&gt;" in text


def test_one_graph_is_chosen_by_mode_and_size(run, looked_into, here):
    words = ("--mode", "decode", "--batch-size", "2")
    assert run("export", looked_into, "--out", "one.dot", *words).code == 0
    assert (here / "one.dot").read_text().startswith('digraph "DECODE 2"')
    assert run("export", looked_into, "--out", "one.svg", *words).code == 0
    picture = "".join(ET.fromstring((here / "one.svg").read_text()).itertext()).replace("\xa0", " ")
    assert "module and kernel" in picture
    assert "DECODE 2" in picture
    assert "DECODE 1" not in picture


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ((), "these are 2: DECODE 1, DECODE 2."),
        (("--mode", "DRAFT"), "no mode 'DRAFT' in this record: TARGET_VERIFY, DECODE."),
        (("--batch-size", "7"), "no batch size 7 of any mode in this record: 1, 2."),
    ],
)
def test_a_choice_that_fits_no_graph_or_many_is_wrong_usage(run, looked_into, here, words, there):
    ended = run("export", looked_into, "--out", "one.dot", *words)
    assert (ended.code, ended.out) == (2, "")
    assert there in ended.error
    assert not (here / "one.dot").exists()


@pytest.mark.parametrize("name", ["out.html", "out.dot", "out.trace.json"])
def test_a_record_without_nodes_fails_and_says_so(run, saved, here, name):
    body = json.loads(saved.read_text())
    saved.write_text(json.dumps({**body, "graphs": []}))
    ended = run("export", saved, "--out", name)
    assert (ended.code, ended.out) == (1, "")
    assert "made without looking into graphs" in ended.error
    assert not (here / name).exists()


def test_a_graph_and_a_recording_are_taken_too(run, looked_into, here):
    environment = json.loads(looked_into.read_text())["environment"]
    one = {"schema": 1, "kind": "graph", **graph(environment, 4, "gemm")}
    recording = {
        "schema": 1, "kind": "recording", "command": ["python"], "exit_code": 0,
        "environment": environment, "processes": [], "graphs": [graph(environment, 4, "gemm")],
    }  # fmt: skip
    for name, body in (("one", one), ("recording", recording)):
        (here / f"{name}.json").write_text(json.dumps(body))
        for form in ("json", "html", "svg", "dot", "trace.json"):
            assert run("export", f"{name}.json", "--out", f"{name}.out.{form}").code == 0
            assert "gemm" in (here / f"{name}.out.{form}").read_text()
