"""``graphkit plan``."""

from __future__ import annotations

import json

import pytest

from graphkit.records import PlanRecord


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("batch_size\n" + "3\n" * 30 + "8\n" * 10 + "1\n" * 10)
    return str(file)


def test_the_list_is_printed_and_written(run, log, tmp_path):
    out = tmp_path / "plan.json"
    done = run("plan", "--traffic", log, "--max-sizes", "2", "--out", str(out))
    assert done.code == 0
    assert "2 sizes: 0.40 pad requests per replay; the default of 8 sizes: 0.00" in done.out
    assert "\n--batch-sizes 3,8\n" in done.out
    assert PlanRecord.load(out).chosen.batch_sizes == (3, 8)
    assert f"wrote {out}" in done.err


def test_json_is_the_record(run, log):
    done = run("plan", "--traffic", log, "--json")
    assert PlanRecord.from_json(done.out).chosen.batch_sizes == (1, 3, 8)


def test_commands_take_the_file_as_their_sizes(run, log, tmp_path, tiny):
    out = tmp_path / "plan.json"
    (tmp_path / "small.csv").write_text("batch_size\n1\n2\n")
    run("plan", "--traffic", str(tmp_path / "small.csv"), "--max-sizes", "1", "--out", str(out))
    sizes = ("--batch-sizes", str(out), "--mode", "decode", "--device", "cpu")
    record = tmp_path / "capture.json"
    done = run("capture", f"{tiny}:right", *sizes, "--out", str(record))
    assert done.code == 0, done.err
    (mode,) = json.loads(record.read_text())["modes"]
    assert [size["batch_size"] for size in mode["sizes"]] == [2]
    done = run("plan", "--traffic", log, "--record", str(record), "--max-sizes", "2")
    assert done.code == 0, done.err
    assert "times    of DECODE" in done.out


@pytest.mark.parametrize(
    ("options", "expected", "code"),
    [
        (["--max-sizes", "0"], "'0' is not a whole number of at least 1", 2),
        (["--max-memory", "500X"], "'500X' is not an amount of memory", 2),
        (["--max-capture-seconds", "nan"], "'nan' is not a number of seconds above 0", 2),
        (["--max-sizes", "2", "--max-memory", "1G"], "not allowed with argument", 2),
        (["--max-memory", "1G"], "a budget of memory_bytes needs a record", 2),
        (["--record", "none.json"], "cannot read record none.json", 2),
    ],
)
def test_refusals(run, log, options, expected, code):
    done = run("plan", "--traffic", log, *options)
    assert expected in done.err
    assert done.code == code
    assert done.out == ""


def test_a_bad_log_and_a_bad_plan_are_a_wrong_usage(run, tmp_path):
    bad = tmp_path / "bad"
    bad.write_text("batch_size\nx\n")
    done = run("plan", "--traffic", str(bad))
    assert done.code == 2
    assert "line 2: batch_size is 'x'" in done.err
    done = run("capture", "--batch-sizes", str(bad))
    assert done.code == 2
    assert "not a whole record" in done.err
    done = run("capture", "--batch-sizes", "one,two")
    assert "'one,two' is not a list of sizes such as 1,2,4, nor the file of a plan" in done.err
