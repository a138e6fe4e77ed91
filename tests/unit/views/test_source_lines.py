"""The line that made a node is in sight, also in 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkit.records import Node, load_record
from graphkit.views.pages import graph_page
from graphkit.views.pages.graph_groups import graph_groups
from graphkit.views.source_code import source_cell, source_sentence
from graphkit.views.text.page import page_view

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
    assert verify.endswith("layers.py:110 +9")
