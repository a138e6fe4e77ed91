"""The whole command line in one table: a new word has to be written down here too."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import graphkit
from graphkit.audit import AUDITS
from graphkit.cli.exit_codes import exit_code_of
from graphkit.errors import CaptureError, ConfigError, DeviceError, GraphkitError, TargetError
from graphkit.runners import RUNNERS

GLOBAL = {"-h", "--help", "--version", "-v", "--verbose"}
COMMANDS = {
    "capture": {"TARGET", "--mode", "--batch-sizes", "--device", "--out", "--json"},
    "inspect": {
        "RECORD|TARGET", "--mode", "--batch-sizes", "--device", "--batch-size", "--plain", "--json",
    },
    "audit": {
        "TARGET", "--mode", "--batch-sizes", "--device", "--only", "--lock", "--check", "--out",
        "--json",
    },
    "diff": {"A", "B", "--json"},
    "export": {"RECORD", "--out", "--mode", "--batch-size"},
    "record": {"SCRIPT", "-m", "--out"},
    "generate": {
        "--prompt", "--checkpoint", "--algorithm", "--topk", "--num-steps", "--num-draft-tokens",
        "--generation", "--max-new-tokens", "--temperature", "--seed", "--device", "--eager",
        "--json",
    },
    "doctor": {"--json"},
}  # fmt: skip
HELP = {"-h", "--help"}


def words_in(text):
    """Flags, and operands written in capitals, as a help text lists them."""
    listed = re.findall(r"^  (\S.*?)(?:  |$)", text, re.MULTILINE)
    words = set()
    for entry in listed:
        words |= {part.split()[0] for part in entry.split(", ")}
    return {word for word in words if word.startswith("-") or word.isupper()}


def test_the_commands_are_those_of_the_table(run):
    ended = run("--help")
    assert (ended.code, ended.err) == (0, "")
    assert re.findall(r"^    (\w.*?)  ", ended.out, re.MULTILINE) == list(COMMANDS)
    assert words_in(ended.out) - {"COMMAND"} == GLOBAL


@pytest.mark.parametrize("command", COMMANDS)
def test_the_words_of_a_command_are_those_of_the_table(run, command):
    ended = run(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert words_in(ended.out) == COMMANDS[command] | HELP
    assert ended.out.startswith(f"usage: graphkit {command} ")


def test_what_a_word_may_be_is_told_in_full(run):
    """Written out in the help, which loads neither torch nor the audits."""
    told = " ".join(run("audit", "--help").out.split())
    *others, last = (mode.name for mode in RUNNERS)
    assert f"--mode M {', '.join(others)} or {last}, in small letters too" in told
    assert f"these audits alone, of {', '.join(AUDITS)}; default" in told


def test_version(run):
    ended = run("--version")
    assert (ended.code, ended.out) == (0, f"graphkit {graphkit.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nothing",),
        ("capture", "--nothing"),
        ("capture", "--device", "tpu"),
        ("capture", "--mode"),
        ("capture", "a:b", "c:d"),
        ("export",),
        ("export", "record.json"),
        ("diff", "record.json"),
        ("doctor", "now"),
    ],
)
def test_wrong_words_are_wrong_usage(run, words):
    ended = run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert "usage: graphkit" in ended.err
    assert "error: " in ended.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceError("no"), 3),
        (TargetError("no"), 2),
        (ConfigError("no"), 2),
        (CaptureError("DECODE", 1, graphkit.CaptureCause.FORWARD_ERROR, "here"), 1),
        (GraphkitError("no"), 1),
    ],
)
def test_the_exit_code_of_an_error(error, code):
    assert exit_code_of(error) == code


def test_the_module_is_the_command_and_writes_no_colour_into_a_pipe():
    done = subprocess.run(
        [sys.executable, "-m", "graphkit", "doctor"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "recorder backend" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_module_hands_on_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "graphkit", "capture", "nonsense"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: TARGET 'nonsense'")
    assert "Traceback" not in done.stderr
