"""Records survive JSON, and any other text is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from graphkit.errors import RecordError
from graphkit.records import (
    SCHEMA,
    CaptureRecord,
    Edge,
    Environment,
    GraphRecord,
    Mismatch,
    Node,
    load_record,
)
from graphkit.views import capture_view
from record_values import KINDS, records_of

DATA = Path(__file__).parents[1] / "data"
FUZZ = settings(deadline=None, derandomize=True, max_examples=60)
RECORDS = st.one_of(*map(records_of, KINDS.values()))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
EXAMPLE = {
    "schema": SCHEMA,
    "kind": "capture",
    "target": "tiny",
    "backend": "recorder",
    "environment": {
        "device": "cpu", "torch": "2", "triton": "", "cuda": "", "driver": "", "graphkit": "0",
    },
    "modes": [
        {
            "mode": "DECODE", "tokens_per_request": 1, "host_planned": False, "input_bytes": 8,
            "sizes": [
                {
                    "batch_size": 1, "num_tokens": 1, "num_nodes": 5, "capture_ms": 1.5,
                    "pool_bytes": 64, "replay_us": 3.0, "eager_us": None,
                    "largest_difference": 0.0, "batches_compared": 1,
                }
            ],
        }
    ],
    "mismatches": [{"field": "logits", "row": 0, "request": 0, "expected": 1.0, "got": 2.0}],
}  # fmt: skip
PATHS = [
    ("target",), ("backend",), ("environment", "torch"), ("modes", 0, "mode"),
    ("modes", 0, "tokens_per_request"), ("modes", 0, "sizes", 0, "batch_size"),
    ("modes", 0, "sizes", 0, "capture_ms"), ("modes", 0, "sizes", 0, "pool_bytes"),
    ("mismatches", 0, "row"), ("mismatches", 0, "expected"),
]  # fmt: skip
REQUIRED = [("schema",), ("kind",), ("environment",), ("modes",), ("modes", 0, "sizes"), *PATHS]


def changed(path, value):
    """The example's text with one value replaced, or dropped if that is ``...``."""
    body = copy.deepcopy(EXAMPLE)
    place = body
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(body)


def refused(text):
    with pytest.raises(RecordError) as caught:
        CaptureRecord.from_json(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@FUZZ
@given(RECORDS)
def test_a_file_is_read_without_naming_its_kind(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "record.json"
    path.write_text(record.to_json(), encoding="utf-8")
    assert load_record(path) == record


def test_a_file_is_read_before_the_module_of_its_kind_is_loaded():
    """Names of the package load on first use, and this program uses no name of a kind."""
    path = Path(__file__).parents[1] / "data" / "h200-capture.json"
    code = "import sys; from graphkit.records import load_record; load_record(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@FUZZ
@given(RECORDS)
def test_a_record_of_another_kind_is_refused(record):
    for cls in KINDS.values():
        if cls is not type(record):
            with pytest.raises(RecordError, match=f"not a {cls.KIND} record"):
                cls.from_json(record.to_json())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_text_is_json_for_every_reader(value):
    """Infinity and NaN are no JSON; a mismatch is where they turn up."""
    record = CaptureRecord.from_json(json.dumps(EXAMPLE))
    wrong = Mismatch(field="logits", row=0, request=0, expected=1.0, got=value)
    text = dataclasses.replace(record, mismatches=(wrong,)).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert repr(CaptureRecord.from_json(text).mismatches[0].got) == repr(value)


@FUZZ
@given(st.integers(0, len(json.dumps(EXAMPLE)) - 1))
def test_a_truncated_text_is_refused(end):
    refused(json.dumps(EXAMPLE)[:end])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "5", "{}", '{"schema": 1}', '{"kind": "bench", "schema": 1}', "\ufeff{}",
     "9" * 5000, "[" * 100_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_foreign_text_is_refused(text):
    refused(text)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 10**9])
def test_a_newer_schema_is_refused_with_what_to_do(schema):
    text = refused(changed(("schema",), schema))
    assert f"schema {schema}, this graphkit reads up to {SCHEMA}. Upgrade graphkit." in text


@pytest.mark.parametrize("schema", [0, -1, True, 1.0, "1", None, [1]])
def test_an_invalid_schema_is_refused(schema):
    refused(changed(("schema",), schema))


@pytest.mark.parametrize("path", REQUIRED, ids=str)
@pytest.mark.parametrize("value", [..., None, [5], {"a": 1}], ids=str)
def test_a_value_that_is_missing_or_of_a_wrong_type_is_refused(path, value):
    refused(changed(path, value))


@pytest.mark.parametrize("path", [("modes",), ("modes", 0, "sizes"), ("mismatches",)], ids=str)
@pytest.mark.parametrize("value", [5, "modes", {}, [None], ["mode"]], ids=str)
def test_a_list_of_something_else_is_refused(path, value):
    refused(changed(path, value))


@FUZZ
@given(st.text() | anything.map(json.dumps))
def test_any_text_and_any_json_is_refused(text):
    refused(text)


@FUZZ
@given(st.sampled_from(REQUIRED), anything)
def test_a_record_that_is_read_can_be_shown_and_written(path, value):
    try:
        record = CaptureRecord.from_json(changed(path, value))
    except RecordError:
        return
    Console(file=io.StringIO()).print(capture_view(record))
    assert repr(CaptureRecord.from_json(record.to_json())) == repr(record)


def test_a_record_of_schema_1_is_read_with_its_eager_reason():
    mode = {"mode": "DECODE", "tokens_per_request": 1, "host_planned": True, "input_bytes": 8,
            "sizes": [], "stays_eager": "the backend plans on the host"}  # fmt: skip
    old = CaptureRecord.from_json(json.dumps(EXAMPLE | {"schema": 1, "modes": [mode]}))
    assert old.modes[0].eager_reason == "the backend plans on the host"
    assert json.loads(old.to_json())["schema"] == SCHEMA
    assert CaptureRecord.from_json(old.to_json()) == old


def test_a_capture_that_an_earlier_release_saved_is_read(tmp_path):
    body = json.loads((DATA / "h200-capture.json").read_text(encoding="utf-8"))
    assert body["schema"] == 1
    assert isinstance(load_record(DATA / "h200-capture.json"), CaptureRecord)
    body["modes"][0]["stays_eager"] = "it synchronizes"
    (tmp_path / "old.json").write_text(json.dumps(body), encoding="utf-8")
    assert load_record(tmp_path / "old.json").modes[0].eager_reason == "it synchronizes"


def test_schema_2_does_not_know_the_field_names_of_schema_1():
    mode = EXAMPLE["modes"][0] | {"stays_eager": "an old name"}
    record = CaptureRecord.from_json(json.dumps(EXAMPLE | {"modes": [mode]}))
    assert record.modes[0].eager_reason == ""


def test_an_unknown_field_of_the_same_schema_is_ignored():
    text = changed(("modes", 0, "sizes", 0, "joules"), 5)
    assert CaptureRecord.from_json(text) == CaptureRecord.from_json(json.dumps(EXAMPLE))


def test_load_reads_a_file_and_says_which_it_cannot_read(tmp_path):
    (tmp_path / "good").write_text(json.dumps(EXAMPLE))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    assert CaptureRecord.load(tmp_path / "good") == CaptureRecord.load(str(tmp_path / "good"))
    for name in ("missing", "binary", "", "nul\0byte"):
        with pytest.raises(RecordError, match="cannot read record") as caught:
            CaptureRecord.load(f"{tmp_path}/{name}")
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "capture", "sch', "not a whole record: JSONDecodeError"),
        (json.dumps(EXAMPLE | {"schema": SCHEMA + 1}), "Upgrade graphkit"),
        (json.dumps(EXAMPLE | {"target": 5}), "capture.target: expected `str`, got `int`"),
        ('{"kind": "photograph", "schema": 1}', "its kind is 'photograph'"),
    ],
)
@pytest.mark.parametrize("load", [load_record, CaptureRecord.load], ids=["any", "capture"])
def test_a_file_that_is_refused_is_named(tmp_path, text, words, load):
    """``diff A B`` reads two."""
    path = tmp_path / "torn.json"
    path.write_text(text)
    with pytest.raises(RecordError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_a_refusal_is_one_short_line_whatever_the_value():
    graph = {
        "name": "g", "backend": "cuda", "environment": EXAMPLE["environment"],
        "nodes": [{"index": 0, "kind": "", "name": "", "short_name": "",
                   "attributes": {"two\nlines" * 1000: 3}}],
    }  # fmt: skip
    for path, value in ((("schema",), "x" * 10_000), (("kind",), "y\n" * 10_000)):
        assert len(refused(changed(path, value))) < 200
    said = refused(json.dumps(EXAMPLE | {"graphs": [graph]}))
    assert said.endswith("capture.graphs[0].nodes[0].attributes[...]: expected `str`, got `int`.")
    assert len(said) < 200


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["large", "small"])
def test_an_integer_beyond_64_bits_is_refused(number):
    assert "sizes[0].pool_bytes: expected `int`" in refused(changed(PATHS[7], number))


def test_a_key_that_is_no_number_is_refused_with_its_mapping():
    stats = {"replays": 0, "padded_rows": 0, "fallbacks": {}, "replays_by_size": {"one": 1}}
    mode = EXAMPLE["modes"][0] | {"stats": stats}
    assert "key in capture.modes[0].stats.replays_by_size: expected `int`" in refused(
        json.dumps(EXAMPLE | {"modes": [mode]})
    )


@pytest.mark.parametrize("value", ["nan", "1.0", "", [1.0], None, True], ids=str)
def test_text_that_is_no_number_is_refused(value):
    assert "mismatches[0].got: expected `float`" in refused(
        changed(("mismatches", 0, "got"), value)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_declared_with_its_range(kind):
    """A plain float would not be read where it was written as ``NaN``."""
    assert not {int, float} & set(declared_types(KINDS[kind]))


def declared_types(declared):
    yield declared
    if dataclasses.is_dataclass(declared):
        inner = get_type_hints(declared, include_extras=True)
        parts = [inner[field.name] for field in dataclasses.fields(declared)]
    else:
        parts = get_args(declared) if get_origin(declared) is not Annotated else ()
    for part in parts:
        yield from declared_types(part)


def test_the_layout_of_the_text_stays():
    """Fingerprints of lock files are hashes of it."""
    edge = Edge(source=0, target=1)
    nodes = tuple(Node(index=i, kind="kernel", name="k()", short_name="k") for i in (0, 1))
    empty = Environment(device="", torch="", triton="", cuda="", driver="", graphkit="")
    graph = GraphRecord(name="g", backend="cuda", environment=empty, nodes=nodes, edges=(edge,))
    body = graph.to_json().partition('"nodes"')[2]
    assert (
        body
        == """: [
    {"index":0,"kind":"kernel","name":"k()","short_name":"k"},
    {"index":1,"kind":"kernel","name":"k()","short_name":"k"}
  ],
  "edges": [
    {"source":0,"target":1}
  ],
  "timing": null,
  "memory": null
}
"""
    )
