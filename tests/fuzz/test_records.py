"""Any file is read as a record that can be written again, or refused with a RecordError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import graphkit as gk
from graphkit.records import Record, load_record
from record_values import KINDS, TEXT, records_of

RESULTS = sorted((Path(__file__).parents[2] / "tools" / "bench" / "results").glob("*.json"))
ODD = st.one_of(
    st.none(), st.booleans(), TEXT, st.integers(), st.just([]), st.just({}), st.just([[]]),
    st.sampled_from([1e400, -0.0, 10**400, 1.5, "NaN", "Infinity", "\ud800", {"": None}]),
)  # fmt: skip


def paths_in(tree: Any) -> list[tuple[Any, ...]]:
    """The way to every value of a JSON document."""
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [(), *((key, *path) for key, value in inner for path in paths_in(value))]


@st.composite
def changed(draw, text):
    """A document with one value replaced, dropped or doubled, or one piece of its text."""
    way = draw(st.sampled_from(["value", "key", "cut", "letters", "twice"]))
    at = draw(st.integers(0, len(text)))
    if way == "cut":
        return text[:at]
    if way == "letters":
        return text[:at] + draw(TEXT) + text[at + draw(st.integers(0, 3)) :]
    if way == "twice":
        return text[:at] + text
    tree = json.loads(text)
    *path, last = draw(st.sampled_from(paths_in(tree)[1:]))
    owner = tree
    for key in path:
        owner = owner[key]
    if way == "value" or isinstance(owner, list):
        owner[last] = draw(ODD)
    else:
        owner[draw(TEXT)] = owner.pop(last)
    return json.dumps(tree)


def read(path, text):
    """The record in a file of this text, ``None`` if it is refused."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        return load_record(path)
    except gk.RecordError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_record_is_read_or_refused(many, tmp_path, kind):
    @many(25)
    @given(st.data())
    def check(data):
        text = data.draw(records_of(KINDS[kind])).to_json()
        record = read(tmp_path / "record.json", data.draw(changed(text)))
        assert record is None or read(tmp_path / "record.json", record.to_json()) is not None

    check()


@pytest.mark.slow
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_damaged_real_record_is_read_or_refused(many, tmp_path, path):
    text, seen = path.read_text(encoding="utf-8"), []

    @many(60)
    @given(changed(text))
    def check(damaged):
        record = read(tmp_path / "record.json", damaged)
        seen.append(record is None)
        assert record is None or isinstance(record, Record)

    check()
    assert 0 < sum(seen) < len(seen)


def test_an_integer_in_place_of_a_float_beyond_the_floats_is_refused(tmp_path):
    names = ("device", "torch", "triton", "cuda", "driver", "graphkit")
    body = {
        "schema": 1, "kind": "bench", "name": "", "settings": {},
        "environment": dict.fromkeys(names, ""),
        "measures": [{"name": "", "value": 10**400, "unit": ""}],
    }  # fmt: skip
    assert read(tmp_path / "record.json", json.dumps(body)) is None
    with pytest.raises(gk.RecordError, match=r"measures\[0\].value: number out of range"):
        load_record(tmp_path / "record.json")
