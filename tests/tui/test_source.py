"""The source line of a node: below the list, and with the lines around it on the node's page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkit.views.pages.node import node_page

CODE = """\
import torch


def forward(x):
    y = torch.relu(x)
    return y
"""


@pytest.fixture
def graph(capture, tmp_path, monkeypatch):
    """A graph whose first node was made by line 5 of ``model.py`` in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(CODE, encoding="utf-8")
    graph = capture.graphs[0]
    first = replace(graph.nodes[0], source="model.py:5 in forward")
    return replace(graph, nodes=(first, *graph.nodes[1:]))


def test_the_line_is_shown_below_the_note_of_the_selected_node(graph, drive):
    async def script(on):
        with_line = on.lines
        await on.press("down")
        return with_line, on.lines

    with_line, without = drive(graph, script)
    at = next(at for at, line in enumerate(with_line) if line.startswith("#0 · "))
    assert with_line[at + 1] == "5: y = torch.relu(x)"
    assert not any("torch.relu" in line for line in without), "the second node has no line"


def test_control_characters_in_a_file_are_written_out(graph, drive, tmp_path):
    text = CODE.replace("torch.relu(x)", "'\x1b[31m'")
    (tmp_path / "shown.py").write_text(text, encoding="utf-8")
    nodes = (replace(graph.nodes[0], source="shown.py:5 in forward"), *graph.nodes[1:])

    async def script(on):
        return on.lines

    lines = drive(replace(graph, nodes=nodes), script)
    assert "5: y = '\\x1b[31m'" in lines


def test_the_page_of_a_node_has_the_lines_around_it(graph, tmp_path):
    page = node_page(graph, 0)
    (section,) = (row for row in page.rows if row.key == "source code")
    assert section.values[1] == str(tmp_path / "model.py")
    assert section.key in page.opened
    lines = [(row.values[0], row.values[1]) for row in section.children]
    assert lines == [
        ("  2", ""), ("  3", ""), ("  4", "def forward(x):"), ("> 5", "    y = torch.relu(x)"),
        ("  6", "    return y"),
    ]  # fmt: skip
    assert [row.tone for row in section.children].count("") == 1


def test_a_node_without_a_source_has_no_such_rows(graph):
    assert "source code" not in [row.key for row in node_page(graph, 1).rows]


def test_a_file_of_another_machine_is_said_to_be_missing(graph):
    nodes = (replace(graph.nodes[0], source="engine/lost.py:5 in forward"), *graph.nodes[1:])
    (section,) = (
        row for row in node_page(replace(graph, nodes=nodes), 0).rows if row.key == "source code"
    )
    assert section.values[1] == "not on this machine, or changed since"
    assert "Start graphkit in the folder of the program" in section.note
    assert section.make_children is None
