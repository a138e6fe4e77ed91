"""The lines of source that nodes come from: found in a file, and named in a column."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkit.records import Node, load_record
from graphkit.views.module_tree import source_cell, source_sentence
from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.initial import graph_groups
from graphkit.views.source_code import source_code, source_line
from graphkit.views.text.page import page_view

TEXT = """\
scale = 2


class Layer:
    def forward(self, x):
        y = x * scale
        return y


def other(x):
    return x
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with ``engine/layer.py`` two folders below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "src" / "engine").mkdir(parents=True)
    (tmp_path / "src" / "engine" / "layer.py").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_the_line_is_shown_between_those_around_it(folder):
    code = source_code("engine/layer.py:6 in forward", around=1)
    assert code.path == str(folder / "src" / "engine" / "layer.py")
    assert code.lines == tuple(enumerate(TEXT.splitlines()[4:7], 5))
    assert (code.line, code.problem) == (6, "")
    assert source_line("engine/layer.py:6 in forward") == "6: y = x * scale"


def test_lines_at_the_ends_of_the_file_have_fewer_around_them(folder):
    assert source_code("engine/layer.py:1 in <module>").lines[0] == (1, "scale = 2")
    assert source_code("engine/layer.py:11 in other").lines[-1] == (11, "    return x")


@pytest.mark.parametrize(
    "source",
    [
        "engine/layer.py:11 in forward", "engine/layer.py:5 in forward",
        "engine/layer.py:99 in <module>", "engine/layer.py:0 in <module>",
        "engine/absent.py:6 in forward", "layer.py:6 in forward",
        "../engine/layer.py:6 in forward", "src/engine/layer.py:6 in forward",
    ],
)  # fmt: skip
def test_no_line_is_shown_where_the_file_does_not_match(folder, source):
    code = source_code(source)
    assert (code.lines, code.path) == ((), "")
    assert code.problem == "not on this machine, or changed since"
    assert source_line(source) == ""


@pytest.mark.parametrize("source", ["", "kernel.cu:3", "in forward", "a\x00b.py:1 in f", "x.py"])
def test_a_source_that_is_no_line_of_a_file_is_shown_without_lines(folder, source):
    assert source_code(source).lines == ()


def test_an_absolute_path_is_not_read(folder):
    assert source_code(f"{folder / 'src' / 'engine' / 'layer.py'}:6 in forward").lines == ()


def test_of_several_files_that_match_none_is_shown(folder):
    (folder / "engine").mkdir()
    (folder / "engine" / "layer.py").write_text(TEXT, encoding="utf-8")
    assert source_code("engine/layer.py:6 in forward").problem == "several files match"


def test_a_file_that_is_too_large_or_no_python_or_no_file_is_not_shown(folder):
    place = folder / "engine"
    place.mkdir()
    (place / "large.py").write_text(TEXT + "#" * (1 << 20), encoding="utf-8")
    (place / "broken.py").write_text("def forward(:\n" * 8, encoding="utf-8")
    (place / "folder.py").mkdir()
    os.mkfifo(place / "pipe.py")
    for name in ("large", "broken", "folder", "pipe"):
        assert source_code(f"engine/{name}.py:6 in forward").lines == ()


def test_bytes_that_are_no_text_are_replaced(folder):
    (folder / "bytes.py").write_bytes(b"def f():\n    return '\xff\xfe'\n")
    assert source_line("bytes.py:2 in f") == "2: return '\ufffd\ufffd'"


def test_a_working_folder_that_was_removed_is_not_searched(folder, monkeypatch):
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert source_code("engine/layer.py:6 in forward").path.endswith("engine/layer.py")


DATA = Path(__file__).parents[2] / "data"


def node(source, us=None):
    return Node(
        index=0, kind="kernel", name="k", short_name="k", source=source, duration_us=us
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "cell", "sentence"),
    [
        ([], "", ""),
        ([("", 5.0)], "", ""),
        ([("a/b.py:3 in f", None)], "b.py:3", "a/b.py:3 in f"),
        ([("serve.py:88", 1.0)] * 2, "serve.py:88", "serve.py:88"),
        ([("<string>:1", 1.0)], "<string>:1", "<string>:1"),
        ([("a.py:1", 1.0), ("b.py:2", 9.0)], "b.py:2 +1", "b.py:2, a.py:1"),
        (
            [("a.py:1", 1.0), ("b.py:2", 2.0), ("c.py:3", 2.5), ("a.py:1", 2.0)],
            "a.py:1 +2", "a.py:1, c.py:3, and 1 more line",
        ),
    ],
)  # fmt: skip
def test_the_most_expensive_line_is_named_first(sources, cell, sentence):
    nodes = [node(*each) for each in sources]
    assert (source_cell(nodes), source_sentence(nodes)) == (cell, sentence)


def test_lines_of_a_real_step_are_in_80_columns(text):
    (group,) = graph_groups(load_record(DATA / "h200-8b-step.json"))
    shown = text(page_view(graph_page(group, 0), is_expanded=False), 80)
    (verify,) = [line for line in shown.splitlines() if line.startswith("verify ")]
    assert verify.endswith("modeling_llama.py:322 +6")
