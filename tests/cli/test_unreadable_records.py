"""Commands that read a record refuse anything else on one line, and write nothing."""

from __future__ import annotations

import json

import pytest

from graphkit.records import BenchReport, Environment

CONTENTS = {
    "missing": (None, "cannot read record"),
    "empty": (b"", "not a whole record"),
    "truncated": (b'{"kind": "capture", "schema": 1, "tar', "not a whole record"),
    "without fields": (b'{"kind": "capture", "schema": 1}', "not a whole record"),
    "newer": (b'{"kind": "capture", "schema": 99}', "Upgrade graphkit"),
    "of another kind": (b'{"kind": "photograph", "schema": 1}', "no record of graphkit"),
    "a list": (b"[1, 2]", "not a record of graphkit"),
    "no text": (b"\xff\x00", "cannot read record"),
    "a picture": (b"\x89PNG", "cannot read record"),
}
COMMANDS = (
    "inspect odd.json --plain",
    "inspect odd.json --json",
    "export odd.json --out out.json",
    "export odd.json --out out.svg",
    "export odd.json --out out.html",
    "export odd.json --out out.trace.json",
    "diff odd.json record.json",
    "diff record.json odd.json",
)


def check_refused(run, here, command, text):
    ended = run(*command.split())
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.error
    assert not list(here.glob("out.*"))


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_record(run, here, content):
    written, text = CONTENTS[content]
    if written is not None:
        (here / "odd.json").write_bytes(written)
    check_refused(run, here, COMMANDS[0], text)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_does_not_exist(run, here, saved, command):
    check_refused(run, here, command, "cannot read record")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_record(run, here, saved, saved_once, command):
    (here / "odd.json").write_text(saved_once[: len(saved_once) // 2])
    check_refused(run, here, command, "not a whole record")
    body = json.loads(saved_once)
    body["modes"][0]["sizes"][0]["capture_ms"] = "fast"
    (here / "odd.json").write_text(json.dumps(body))
    check_refused(run, here, command, "not a whole record: capture.modes[0].sizes[0].capture_ms")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "out.json" not in c and "svg" not in c])
def test_a_record_without_graphs(run, here, saved, command):
    environment = Environment(device="cpu", torch="2", triton="", cuda="", driver="", graphkit="0")
    report = BenchReport(name="refresh", environment=environment, settings={}, measures=())
    (here / "odd.json").write_text(report.to_json())
    check_refused(run, here, command, "of kind 'bench' holds no graphs")
