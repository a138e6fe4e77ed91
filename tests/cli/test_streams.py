"""The standard streams of a command: closed, full, broken, or with a narrow encoding."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from graphkit.cli import output
from graphkit.cli.output import write_stdout
from graphkit.records import CaptureRecord

RECORD = Path(__file__).parents[1] / "data" / "h200-capture.json"
TEXT, JSON = ("inspect", RECORD), ("diff", RECORD, RECORD, "--json")


@pytest.fixture
def command(monkeypatch):
    """Return ``command(arguments, redirection)``, which runs ``graphkit`` in its own process."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(arguments, redirection="", **options):
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "graphkit"]
        return subprocess.run(
            [*shell, *map(str, arguments)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
            check=False,
        )

    return run


@pytest.fixture
def broken_pipe():
    """The writing end of a pipe whose reader has closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("arguments", [TEXT, JSON], ids=["text", "json"])
def test_a_reader_that_leaves_early_is_no_failure(command, broken_pipe, arguments):
    done = command(arguments, stdout=broken_pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_changes_neither_exit_code_nor_output_file(
    run, broken_pipe, tiny, here, monkeypatch
):
    with os.fdopen(os.dup(broken_pipe), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        ended = run("capture", f"{tiny}:leaks", "--mode", "decode", "--out", "o.json")
    assert (ended.code, ended.messages) == (1, ["wrote o.json"])
    assert CaptureRecord.load(here / "o.json").mismatches


def test_messages_that_cannot_be_written_are_no_failure(command, broken_pipe, here):
    done = command(("export", RECORD, "--out", "out.json"), stderr=broken_pipe)
    assert done.returncode == 0
    assert (here / "out.json").exists()


@pytest.mark.parametrize(
    ("redirection", "why"),
    [("> /dev/full", "No space left on device"), (">&-", "it is closed")],
)
@pytest.mark.parametrize("arguments", [TEXT, JSON], ids=["text", "json"])
def test_a_result_that_cannot_be_written_is_a_usage_error(command, arguments, redirection, why):
    done = command(arguments, redirection)
    assert (done.returncode, done.stderr) == (2, f"error: cannot write to stdout: {why}.\n")


@pytest.mark.slow
def test_generating_without_a_stdout_is_a_usage_error(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    ended = run("generate", "--prompt", "a", "--max-new-tokens", "1")
    assert (ended.code, ended.error) == (2, "error: cannot write to stdout: it is closed.")


def test_an_error_is_never_written_to_stdout(command):
    """``print`` would write it there if stderr is closed."""
    done = command(("inspect", "nonsense"), "2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_characters_that_the_encoding_lacks_are_written_as_escapes(run, saved, monkeypatch):
    saved.write_text(replace(CaptureRecord.load(saved), target="é").to_json())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert run("inspect", saved).code == 0
    sys.stdout.seek(0)
    assert "\\xe9" in sys.stdout.read()


def test_text_is_flushed_at_once(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    write_stdout("é")
    assert raw.getvalue() == "é".encode()


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ((), ["warning: a fallback of 3"]),
        (("-v",), ["info: a capture", "warning: a fallback of 3"]),
        (("-vv",), ["debug: a detail", "info: a capture", "warning: a fallback of 3"]),
    ],
)
def test_verbose_prints_the_log_to_stderr(run, monkeypatch, options, printed):
    def facts():
        log = logging.getLogger("graphkit.runners")
        log.debug("a detail")
        log.info("a capture")
        log.warning("a fallback of %d", 3)
        return iter(())

    logger = logging.getLogger("graphkit")
    before = logger.level, list(logger.handlers)
    monkeypatch.setattr("graphkit.cli.doctor._facts", facts)
    ended = run(*options, "doctor", "--json")
    assert (ended.code, ended.out) == (0, "[]\n")
    assert ended.err.splitlines() == printed
    assert (logger.level, logger.handlers) == before


def test_other_ranks_print_no_log(run, monkeypatch):
    monkeypatch.setattr(output, "_silent", True)
    monkeypatch.setattr(
        "graphkit.cli.doctor._facts", lambda: logging.getLogger("graphkit").warning("slow") or ()
    )
    assert run("doctor").err == ""


def test_progress_without_a_terminal_is_printed_now_and_then(monkeypatch, capsys):
    printed = threading.Event()
    monkeypatch.setattr(output, "_SECONDS", 0.01)
    monkeypatch.setattr(output, "print_message", lambda line: (lines.append(line), printed.set()))
    lines = []
    with output.progress_on_stderr() as advance:
        assert not printed.wait(0.05), "nothing has begun"
        advance(2, 27, "DECODE capturing 8")
        assert printed.wait(60)
    assert lines[0] == "DECODE capturing 8 (2 of 27 done)"
    assert not [each for each in threading.enumerate() if each.name == "graphkit progress"]
