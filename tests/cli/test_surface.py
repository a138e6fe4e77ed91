"""The whole command line in one table: a new option must be added here too."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import graphkit
from graphkit.audit import AUDITS
from graphkit.cli import build_parser, options
from graphkit.cli.exits import exit_code
from graphkit.errors import CaptureError, ConfigError, DeviceError, GraphkitError, TargetError
from graphkit.models.quantization.weight import QUANTIZATIONS
from graphkit.runners import RUNNERS

RECORD = Path(__file__).parents[1] / "data" / "h200-capture.json"
GLOBAL = {"-h", "--help", "--version", "-v", "--verbose"}
CHECKPOINT = {
    "--checkpoint", "--draft", "--dtype", "--algorithm", "--topk", "--num-steps",
    "--num-draft-tokens", "--page-size", "--quantize", "--row-invariant", "--kv-dtype",
    "--trust-remote-code",
}  # fmt: skip
TARGET = CHECKPOINT | {"--mode", "--batch-sizes", "--device", "--max-context-len"}
COMMANDS = {
    "capture": TARGET | {"TARGET", "--tp", "--one-shot", "--out", "--estimate", "--json"},
    "inspect": TARGET | {"RECORD|TARGET", "--batch-size", "--by", "--plain", "--json"},
    "audit": TARGET | {
        "TARGET", "--only", "--lock", "--check", "--out", "--json", "--tolerance", "--tp",
        "--one-shot",
    },
    "diff": {"A", "B", "--threshold", "--fail-above", "--json"},
    "export": {"RECORD", "--out", "--mode", "--batch-size"},
    "record": {
        "SCRIPT", "-m", "--out", "--audit", "--every", "--json", "--fail-on", "--find-fault",
        "--lock", "--check",
    },
    "generate": CHECKPOINT | {
        "--max-context-len", "--prompt", "--prompts", "--chat", "--generation",
        "--steps-per-launch", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
        "--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--min-tokens",
        "--stop", "--seed", "--device", "--tp", "--one-shot", "--eager", "--json",
    },
    "bench": CHECKPOINT | {
        "--shape", "--batch-sizes", "--generations", "--steps-per-launch", "--context",
        "--steps", "--rounds", "--device", "--tp", "--one-shot", "--out",
        "--json",
    },
    "doctor": {"--json"},
}  # fmt: skip
HELP = {"-h", "--help"}


def arguments_in(text):
    """Return the options, and the operands in capitals, that a help text lists."""
    listed = re.findall(r"^  (\S.*?)(?:  |$)", text, re.MULTILINE)
    names = {part.split()[0] for entry in listed for part in entry.split(", ")}
    return {name for name in names if name.startswith("-") or name.isupper()}


def test_the_commands_are_those_of_the_table(run):
    ended = run("--help")
    assert (ended.code, ended.err) == (0, "")
    assert re.findall(r"^    (\w.*?)  ", ended.out, re.MULTILINE) == list(COMMANDS)
    assert arguments_in(ended.out) - {"COMMAND"} == GLOBAL


def test_the_exit_codes_are_listed(run):
    listed = re.findall(r"^  (\d+)  ", run("--help").out, re.MULTILINE)
    assert listed == ["0", "1", "2", "3", "130", "143"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_of_a_command_are_those_of_the_table(run, command):
    ended = run(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert arguments_in(ended.out) == COMMANDS[command] | HELP
    assert ended.out.startswith(f"usage: graphkit {command} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_can_be_parsed(run, command):
    examples = run(command, "--help").out.rpartition("\nExample")[2].partition("\n")[2]
    assert examples
    for line in examples.splitlines():
        words = shlex.split(line.rpartition("| ")[2])
        if words[0] == "torchrun":
            words = words[words.index("-m") + 1 :]
        assert words[:2] == ["graphkit", command]
        assert build_parser().parse_args(words[1:]).run


def test_the_values_of_an_option_are_listed_in_full(run):
    """The help spells them out, because it imports neither torch nor the audits."""
    text = " ".join(run("audit", "--help").out.split())
    *others, last = (mode.name for mode in RUNNERS)
    assert f"in any case: {', '.join(others)} or {last}; repeatable" in text
    assert f"audits to run, of {', '.join(AUDITS)}; default" in text
    assert tuple(QUANTIZATIONS) == options.QUANTIZATIONS


def test_version(run):
    ended = run("--version")
    assert (ended.code, ended.out) == (0, f"graphkit {graphkit.__version__}\n")


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
    assert exit_code(error) == code


def run_module(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "graphkit", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_module_is_the_command_and_writes_no_colour_into_a_pipe():
    done = run_module("inspect", RECORD)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TARGET_VERIFY" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_module_ends_with_the_exit_code():
    done = run_module("inspect", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot inspect 'nonsense'")
    assert "Traceback" not in done.stderr
