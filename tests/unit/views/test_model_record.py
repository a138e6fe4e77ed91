"""A real record of the whole step of a model of 8 billion parameters, as a page and as rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkit.records import load_record
from graphkit.views.html import html_text
from graphkit.views.selection import named_graphs

LAYERS = "target.model.layers."
RECORD = Path(__file__).parents[2] / "data" / "h200-8b-step.json"


@pytest.fixture(scope="module")
def record():
    return load_record(RECORD)


def test_the_page_is_small(record):
    assert len(html_text(record, named_graphs(record)).encode()) < 2e6


def test_phases_and_layers_are_recorded(record):
    (graph,) = record.graphs
    phases = {node.scope.partition("/")[0] for node in graph.nodes}
    assert phases >= {"draft", "build", "verify", "accept", "extend"}
    layers = {node.module.split(".")[3] for node in graph.nodes if LAYERS in node.module}
    assert len(layers) == 32
