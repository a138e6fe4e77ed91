"""Any arguments, and any saved record, end a command with an exit code and one line of error."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from graphkit.cli import main

DATA = Path(__file__).parents[1] / "data"
TEXTS = st.one_of(
    st.sampled_from([
        "", ":", "a:b", "os:getcwd", "builtins:dict", "-", "--", ".", "/", "folder", "folder/",
        "folder.json", "capture.json", "recording.json", "cut.json", "missing.json", "x" * 300,
        "\udcff", "\0", "[bold]", "-1", "0", "1", "1,2", "9" * 5000, "nan", "inf", "decode",
        "frozen", "NGRAM", "cpu", "tiny", "v1,v2", "1,2.5",
    ]),
    st.text(max_size=5),
)  # fmt: skip
OPTIONS = {
    "capture": ("--mode", "--batch-sizes", "--device", "--out", "--json"),
    "inspect": ("--mode", "--batch-sizes", "--batch-size", "--device", "--plain", "--json"),
    "audit": ("--mode", "--batch-sizes", "--only", "--lock", "--check", "--out", "--json"),
    "diff": ("--json",),
    "export": ("--out", "--mode", "--batch-size"),
    "record": ("--out", "-m"),
    "generate": (
        "--checkpoint",
        "--draft",
        "--prompts",
        "--chat",
        "--stop",
        "--max-context-len",
        "--algorithm",
        "--topk",
        "--num-steps",
        "--page-size",
        "--temperature",
        "--seed",
        "--top-k",
        "--top-p",
        "--min-p",
    ),
    "bench": (
        "--checkpoint",
        "--draft",
        "--shape",
        "--algorithm",
        "--topk",
        "--num-steps",
        "--batch-sizes",
        "--generations",
        "--steps-per-launch",
        "--context",
        "--accept-lengths",
        "--out",
    ),
    "doctor": ("--json",),
}
OPERANDS = {"capture": 1, "inspect": 1, "audit": 1, "diff": 2, "export": 1}
"""Operands that make a command run; without them ``capture`` would capture the reference model."""
MUTATIONS = [-1, 0, 99999, 2.5, math.nan, -1e300, math.inf, None, "", [], {}, "\ud800", True]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with saved records, one of them damaged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("graphkit.audit.foreign.record_program", _refuse_to_run)
    monkeypatch.setattr("graphkit.audit.runs.capture.capture_target", _refuse_to_capture)
    monkeypatch.setattr("graphkit.audit.audit_target", _refuse_to_capture)
    monkeypatch.setattr("graphkit.audit.graph_baseline", _refuse_to_capture)
    for name in ("capture", "recording"):
        shutil.copy(DATA / f"h200-{name}.json", tmp_path / f"{name}.json")
    text = (DATA / "h200-recording.json").read_text(encoding="utf-8")
    (tmp_path / "cut.json").write_text(text[:900], encoding="utf-8")
    for name in ("folder", "folder.json"):
        (tmp_path / name).mkdir()
    return tmp_path


def _refuse_to_run(program):
    """Stand in for a program, which could be any file."""
    raise OSError(f"ran {program}")


def _refuse_to_capture(target, **_options):
    """Stand in for a capture, which may take seconds."""
    raise OSError(f"ran [{target.name}]")


def check(arguments):
    """Run a command; it ends with a documented exit code and at most one line of error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    text = err.getvalue()
    assert code in (0, 1, 2, 3), arguments
    assert "Traceback" not in text
    assert "Run graphkit -v" not in text or "OSError: ran [" in text, (arguments, text)
    assert code == 0 or "error: " in text, arguments
    return code


@st.composite
def argument_lists(draw):
    command = draw(st.sampled_from(sorted(OPTIONS)))
    count = OPERANDS.get(command, 0)
    arguments = draw(st.lists(TEXTS, min_size=count, max_size=count))
    for option in draw(st.lists(st.sampled_from(OPTIONS[command]), max_size=3)):
        arguments += [option, draw(TEXTS)] if draw(st.booleans()) else [option]
    if command in ("generate", "bench"):  # never a run: some option must be refused
        arguments += ["--num-draft-tokens", "1"]
    return [command, *arguments]


@pytest.mark.slow
def test_any_arguments_end_a_command(many, here):
    codes = []

    @many(150)
    @given(argument_lists())
    def run(arguments):
        codes.append(check(arguments))

    run()
    assert set(codes) >= {0, 1, 2}


def paths_in(tree, path=()):
    """Yield the path to every value of a JSON document."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*path, key))


@st.composite
def changed(draw, text):
    """Return a document with a few values replaced, dropped or repeated."""
    tree = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(list(paths_in(tree))))
        owner = tree
        for key in path:
            owner = owner[key]
        change = draw(st.sampled_from(["replace", "replace", "drop", "repeat"]))
        if change == "replace":
            owner[last] = draw(st.sampled_from(MUTATIONS))
        elif change == "drop":
            del owner[last]
        elif isinstance(owner, list):
            owner.append(owner[last])
    return json.dumps(tree)


def small_capture():
    """Return a capture of two small graphs as JSON, so that every command reads it quickly."""
    body = json.loads((DATA / "h200-capture.json").read_text(encoding="utf-8"))
    body["graphs"] = body["graphs"][:2]
    for graph in body["graphs"]:
        graph["nodes"], graph["edges"] = graph["nodes"][:6], graph["edges"][:5]
        graph["timing"]["critical_path"] = [0, 1]
    return json.dumps(body)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["capture", "recording"])
def test_any_changed_record_ends_a_command(many, here, kind):
    text = small_capture() if kind == "capture" else (here / "recording.json").read_text()
    (here / "good.json").write_text(text)
    codes = []

    @many(60)
    @given(changed(text), st.sampled_from(["html", "svg", "trace.json", "json"]))
    def run(damaged, suffix):
        (here / "odd.json").write_text(damaged)
        codes.append(check(["inspect", "odd.json", "--plain"]))
        check(["export", "odd.json", "--out", f"out.{suffix}"])
        check(["diff", "odd.json", "good.json"])
        check(["diff", "good.json", "odd.json", "--json"])
        check(["audit", "os:getcwd", "--check", "odd.json"])

    run()
    assert set(codes) == {0, 2}
