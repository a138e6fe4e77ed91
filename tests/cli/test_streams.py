"""Where a command's words go, and what becomes of them when nobody takes them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphkit.cli.output import write_stdout
from graphkit.records import CaptureRecord

RECORD = Path(__file__).parents[1] / "data" / "h200-capture.json"
TEXT, JSON = ("inspect", RECORD), ("diff", RECORD, RECORD, "--json")


@pytest.fixture
def command(monkeypatch):
    """``command(words, redirection)`` runs the command in a process of its own."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(words, redirection="", **how):
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "graphkit"]
        return subprocess.run(
            [*shell, *map(str, words)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how,
            check=False,
        )

    return run


@pytest.fixture
def left():
    """The end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("words", [TEXT, JSON], ids=["text", "json"])
def test_a_reader_who_has_seen_enough_is_no_failure(command, left, words):
    done = command(words, stdout=left)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_verdict_and_a_file_outlast_the_reader(command, left, tiny, here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(here.parent))
    words = ("capture", f"{tiny}:leaks", "--device", "cpu", "--mode", "decode", "--out", "o.json")
    done = command(words, stdout=left)
    assert (done.returncode, done.stderr) == (1, "wrote o.json\n")
    assert CaptureRecord.load(here / "o.json").mismatches


def test_notes_that_nobody_reads_are_no_failure(command, left, here):
    done = command(("export", RECORD, "--out", "out.json"), stderr=left)
    assert done.returncode == 0
    assert (here / "out.json").exists()


@pytest.mark.parametrize(
    ("redirection", "why"),
    [("> /dev/full", "No space left on device"), (">&-", "it is closed")],
)
@pytest.mark.parametrize("words", [TEXT, JSON], ids=["text", "json"])
def test_a_result_that_cannot_be_written_is_wrong_usage(command, words, redirection, why):
    done = command(words, redirection)
    assert (done.returncode, done.stderr) == (2, f"error: cannot write to stdout: {why}.\n")


def test_generating_without_a_stdout_is_wrong_usage(command):
    done = command(("generate", "--prompt", "a", "--max-new-tokens", "1"), ">&-")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to stdout: it is closed.\n"


def test_an_error_is_never_a_result(command):
    """``print`` would write it to stdout where there is no stderr."""
    done = command(("capture", "nonsense"), "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_characters_that_the_encoding_lacks_are_written_as_escapes(run, saved, monkeypatch):
    saved.write_text(replace(CaptureRecord.load(saved), target="é").to_json())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run("inspect", saved).code == 0
    sys.stdout.seek(0)
    assert "\\xe9" in sys.stdout.read()


def test_text_is_written_at_once(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    write_stdout("é")
    assert raw.getvalue() == "é".encode()
