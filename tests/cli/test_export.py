"""``graphkit export``: every format, none of which loads anything from elsewhere."""

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
def with_nodes(saved):
    """Add the nodes of one mode at two sizes to the saved record."""
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


def test_svg_is_valid_and_shows_the_record(run, saved, here):
    ended = run("export", saved, "--out", "picture.svg")
    assert (ended.code, ended.out) == (0, "")
    root = ET.fromstring((here / "picture.svg").read_text())
    assert root.tag == f"{{{NAMESPACE}}}svg"
    shown = "".join(root.itertext()).replace("\xa0", " ")
    assert "graphkit capture: tiny" in shown
    assert "TARGET_VERIFY" in shown
    assert "6 live batches replayed" in shown


def test_svg_loads_no_other_resource(run, saved, here):
    assert run("export", saved, "--out", "picture.svg").code == 0
    text = re.sub(r"<!--.*?-->", "", (here / "picture.svg").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {NAMESPACE}
    assert "@font-face" not in text
    assert not re.search(r"url\((?!#)", text), "only references within the picture"


def test_svg_is_the_same_from_run_to_run(run, saved, here, monkeypatch):
    assert run("export", saved, "--out", "one.svg").code == 0
    for name, value in {"COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert run("export", saved, "--out", "two.svg").code == 0
    assert (here / "one.svg").read_bytes() == (here / "two.svg").read_bytes()


@pytest.mark.parametrize("name", ["a <b> & 'c'", "{braces} %s", "[bold]markup[/bold]", "日本語 ü"])
def test_svg_can_show_any_name(run, saved, here, name):
    body = json.loads(saved.read_text())
    (here / "odd.json").write_text(json.dumps({**body, "target": name}))
    assert run("export", "odd.json", "--out", "odd.svg").code == 0
    root = ET.fromstring((here / "odd.svg").read_text(encoding="utf-8"))
    assert name in "".join(root.itertext()).replace("\xa0", " ")


@pytest.mark.parametrize(
    ("name", "begins", "holds"),
    [
        ("out.html", "<!doctype html>", "DECODE 1"),
        ("out.trace.json", '{"displayTimeUnit"', "DECODE 2 (not measured"),
        ("trace.json", '{"displayTimeUnit"', "DECODE 2 (not measured"),
        ("out.json", '{\n  "schema"', '"name": "DECODE 2"'),
        ("OUT.trace.html", "<!doctype html>", "DECODE 1"),
    ],
)
def test_the_suffix_selects_the_format(run, with_nodes, here, name, begins, holds):
    ended = run("export", with_nodes, "--out", name)
    assert (ended.code, ended.out, ended.err) == (0, "", f"wrote {name}\n")
    text = (here / name).read_text()
    assert text.startswith(begins)
    assert holds in text


def test_html_escapes_the_name_of_a_kernel(run, with_nodes, here):
    assert run("export", with_nodes, "--out", "page.html").code == 0
    text = (here / "page.html").read_text()
    assert text.count("</script>") == 2, "of the data and of the program"
    assert "gemm</script>" not in text
    assert "gemm&lt;/script&gt;&lt;b&gt;" in text


def test_a_graph_is_selected_by_mode_and_size(run, with_nodes, here):
    options = ("--mode", "decode", "--batch-size", "2")
    assert run("export", with_nodes, "--out", "one.svg", *options).code == 0
    picture = "".join(ET.fromstring((here / "one.svg").read_text()).itertext()).replace("\xa0", " ")
    assert "module and node" in picture
    assert "DECODE 2" in picture
    assert "DECODE 1" not in picture


def test_a_graph_and_a_recording_are_exported_too(run, with_nodes, here):
    environment = json.loads(with_nodes.read_text())["environment"]
    one = {"schema": 1, "kind": "graph", **graph(environment, 4, "gemm")}
    recording = {
        "schema": 1, "kind": "recording", "command": ["python"], "exit_code": 0,
        "environment": environment, "processes": [{"pid": 7, "command": []}],
        "graphs": [graph(environment, 4, "gemm")],
    }  # fmt: skip
    for name, body in (("one", one), ("recording", recording)):
        (here / f"{name}.json").write_text(json.dumps(body))
        for suffix in ("json", "html", "svg", "trace.json"):
            assert run("export", f"{name}.json", "--out", f"{name}.out.{suffix}").code == 0
            assert "gemm" in (here / f"{name}.out.{suffix}").read_text()
