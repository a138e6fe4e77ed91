"""Every record in every format that can hold it, equal in every run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from graphkit.errors import RecordError
from graphkit.records import (
    BenchReport,
    CaptureRecord,
    ForeignRecord,
    GraphRecord,
    MemoryEstimate,
    load_record,
)
from graphkit.records.record import Real
from graphkit.views import FORMATS, Export, diff_view, inspect_view
from graphkit.views.diff import diff_records
from graphkit.views.pages.node import node_page
from graphkit.views.text.page import page_view

REAL = sorted((Path(__file__).parents[2] / "data").glob("**/*.json"))
"""Saved records of real machines."""
GRAPHED = (CaptureRecord, ForeignRecord, GraphRecord)
st.register_type_strategy(
    Mapping, lambda kind: st.dictionaries(*map(st.from_type, get_args(kind)), max_size=2)
)
st.register_type_strategy(get_args(Real)[0], st.floats())


def shown(svg):
    return "".join(ET.fromstring(svg).itertext()).replace("\xa0", " ")


def check_all_forms(record):
    graphs = record.graphs if not isinstance(record, GraphRecord) else (record,)
    for suffix, export in FORMATS.items():
        try:
            text = export(Export(record))
        except RecordError:
            assert (suffix in (".json", ".svg"), graphs) == (False, ())
        else:
            assert text.encode()
            assert text == export(Export(record))


@pytest.mark.parametrize("kind", ["capture", "recording", "graph"])
def test_every_format_of_a_record_with_graphs(request, kind):
    check_all_forms(request.getfixturevalue(kind))


def test_svg_of_a_capture_is_its_table_unless_a_graph_is_selected(capture):
    whole = shown(FORMATS[".svg"](Export(capture)))
    assert "graphkit capture: tiny" in whole
    assert "mode and size" in whole
    assert "module and node" not in whole
    one = shown(FORMATS[".svg"](Export(capture, mode="DRAFT", batch_size=4)))
    assert one.count("module and node") == 1
    assert "mode and size" not in one


def test_json_of_a_selection_is_the_record_with_those_graphs(capture):
    narrow = CaptureRecord.from_json(FORMATS[".json"](Export(capture, mode="DRAFT")))
    assert narrow == dataclasses.replace(capture, graphs=capture.graphs[2:])
    assert FORMATS[".json"](Export(capture)) == capture.to_json()


@pytest.mark.parametrize("suffix", [".html", ".trace.json"])
def test_a_capture_without_nodes_has_no_such_format(capture, suffix):
    with pytest.raises(RecordError, match="the record holds no nodes"):
        FORMATS[suffix](Export(dataclasses.replace(capture, graphs=())))


def test_records_without_graphs_have_json_and_svg(capture):
    bench = BenchReport(name="refresh", environment=capture.environment, settings={}, measures=())
    diff = diff_records(capture, capture)
    parts = {"kv": 1, "recurrent_state": 2, "workspace": 3, "static_buffers": 4}
    memory = MemoryEstimate(backend="recorder", graphs=(), **parts)
    for record in (bench, diff, memory):
        assert json.loads(FORMATS[".json"](Export(record)))["kind"] == record.KIND
        assert f"graphkit {record.KIND}" in shown(FORMATS[".svg"](Export(record)))
        with pytest.raises(RecordError, match=f"of kind '{record.KIND}'"):
            FORMATS[".html"](Export(record))


def test_svg_has_no_character_that_xml_lacks(graph):
    odd = dataclasses.replace(graph, name="a\x00b\x1bc\ufffed")
    assert "module and node" in shown(FORMATS[".svg"](Export(odd)))


def calls_made(function, *arguments):
    """The number of Python functions that are called meanwhile."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_the_work_of_an_export_grows_with_the_number_of_nodes(make_graph, graph, suffix):
    def large(num_layers):
        def places(_size):
            for layer in range(num_layers):
                for node in graph.nodes[:20]:
                    facts = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
                    for name in ("index", "parent", "duration_us", "start_us"):
                        del facts[name]
                    yield facts | {"module": f"layers.{layer}.{node.module}"}

        return Export(make_graph("TARGET_VERIFY", 8, places=places))

    small, twice = large(10), large(20)
    FORMATS[suffix](small)  # fills caches
    assert calls_made(FORMATS[suffix], twice) < 2.5 * calls_made(FORMATS[suffix], small)


@pytest.mark.slow
@settings(
    deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip
@given(st.one_of(*map(st.from_type, GRAPHED)))
def test_any_record_that_can_be_read_can_be_shown(text, record):
    """With any numbers, names and indices."""
    check_all_forms(record)
    text(inspect_view(record))
    text(diff_view(diff_records(record, record)))


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_records_of_real_machines(path, text):
    record = load_record(path)
    if not isinstance(record, GRAPHED):
        pytest.skip("holds no graphs")
    check_all_forms(record)
    text(inspect_view(record))
    graphs = (record,) if isinstance(record, GraphRecord) else record.graphs
    for graph in graphs[:1]:
        for at in range(len(graph.nodes)):
            text(page_view(node_page(graph, at)))
    assert all(graph.is_same for graph in diff_records(record, record).graphs)
