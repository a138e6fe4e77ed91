"""Logs of live sizes, good and bad."""

from __future__ import annotations

import json

import pytest

from graphkit.errors import RecordError
from graphkit.plan import read_traffic


@pytest.fixture
def read(tmp_path):
    """Return ``read(text, **options)``."""

    def read_text(text, **options):
        file = tmp_path / "log"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_traffic(file, **options)

    return read_text


@pytest.mark.parametrize(
    "text",
    [
        "batch_size\n3\n1\n3\n0\n",
        "time, batch_size ,mode\n0.1,3,x\n0.2,1,x\n0.3,3,x\n",
        'count,batch_size\n2,3\n1,"1"\n5,0\n',
        "3\n1\n\n3\n",
        '{"batch_size": 3}\n{"batch_size": 1, "mode": "x"}\n{"batch_size": 3}',
        '{"batch_size": 3, "count": 2}\n{"batch_size": 1}\n',
        '{"live_sizes": {"3": 2, "1": 1}}',
        "\ufeffbatch_size\r\n3\r\n1\r\n3\r\n",
    ],
    ids=["csv", "columns", "counts", "numbers", "lines", "line counts", "stats", "windows"],
)
def test_formats(read, text):
    sizes = read(text)
    assert sizes == {1: 1, 3: 2}
    assert list(sizes) == [1, 3]


def test_counts_of_a_record_are_those_of_a_mode(read, capture_record):
    text = capture_record.to_json()
    assert read(text, mode="DECODE") == {2: 5}
    assert read(text) == {1: 3, 2: 9, 4: 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no step has a live request"),
        ("batch_size\n", "no step has a live request"),
        ("size\n3\n", "the header has no column batch_size: 'size'"),
        ("batch_size\n3\nthree\n", "line 3: batch_size is 'three', expected a whole number"),
        ("batch_size\n-3\n", "line 2: batch_size is '-3'"),
        ("batch_size\n1.5\n", "line 2: batch_size is '1.5'"),
        ("batch_size\n4097\n", "line 2: batch_size is '4097', .* from 0 to 4,096"),
        (f"batch_size\n{'9' * 5000}\n", r"line 2: batch_size is '9{40}\.\.\.'"),
        ("x,batch_size\n3\n", "line 2 is incomplete: '3'"),
        ("batch_size,batch_size\n1,2\n", "the header has 2 columns batch_size"),
        ("batch_size\n1,2\n", "line 2 has 2 values for 1 column: '1,2'"),
        ("3\n{\n", "line 2 is not JSON: '{'"),
        ('{"batch_size": 3}\n{"size": 3}\n', "line 2 has no batch_size"),
        ('{"batch_size": true}\n', "line 1: batch_size is 'True'"),
        ('{"batch_size": 3, "count": -1}\n1\n', "line 1: count is '-1'"),
        ('{"size": 3}', "no batch_size and no live_sizes"),
        ('{"live_sizes": {"\\u001b[31m": 3}}', r"live_sizes: batch_size is '\\x1b\[31m'"),
        ("\x1b[2J\n3\n", r"no column batch_size: '\\x1b\[2J'"),
        ("[1, 2]\n", r"the header has no column batch_size"),
        (b"\xff\xfe3\n", "cannot read traffic"),
        ("batch_size\n\u0663\n", "line 2: batch_size is "),
        ("1_0\n", "line 1 is not JSON"),
        ("1e400\n", "line 1: batch_size is 'inf'"),
        ("[" * 100000, "no column batch_size"),
        ("0" + "[" * 100000, "line 1 is not JSON"),
    ],
)
def test_a_bad_log_is_one_clear_line(read, text, expected):
    with pytest.raises(RecordError, match=expected) as caught:
        read(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    assert message.isprintable()


def test_an_invalid_record_is_named_once(read, capture_record):
    text = capture_record.to_json().replace('"modes": [', '"modes": [3, ', 1)
    with pytest.raises(RecordError) as caught:
        read(text)
    assert str(caught.value).count("not a whole record") == 1
    path, _, rest = str(caught.value).partition(": ")
    assert path not in rest


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"cannot read traffic .*none\.csv: No such file"):
        read_traffic(tmp_path / "none.csv")
    with pytest.raises(RecordError, match="cannot read traffic"):
        read_traffic(tmp_path)


@pytest.mark.slow
def test_a_million_lines(read):
    assert read("batch_size\n" + "7\n" * 1_000_000) == {7: 1_000_000}
    assert read(json.dumps({"batch_size": 9}) + "\n" + "9\n" * 1000) == {9: 1001}
