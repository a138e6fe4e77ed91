"""The command on a pseudo-terminal: its output, its exit, and the fallback to text."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from terminals import on_terminal

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d|10[0-7])[;m]")


@pytest.fixture(scope="module")
def saved(capture, tmp_path_factory):
    path = tmp_path_factory.mktemp("terminal") / "record.json"
    path.write_text(capture.to_json(), encoding="utf-8")
    return path


def show(*words, keys=(), stdin=None, **environment):
    """Everything that ``graphkit WORDS`` writes to a terminal, and its exit code."""
    left = list(keys)

    def press(written, terminal, _command, is_quiet):
        if left and is_quiet and ENTERS in written:
            os.write(terminal, left.pop(0))

    environment = {"TERM": "xterm-256color"} | environment
    return on_terminal(("-m", "graphkit", *words), press, stdin=stdin, **environment)


@pytest.mark.slow
def test_a_terminal_gets_a_screen_and_is_left_as_it_was(saved):
    written, code = show("inspect", saved, keys=(b"jjj\r", b"q"))
    assert code == 0
    assert written.count(ENTERS) == written.count(LEAVES) == 1
    assert b"TARGET_VERIFY" in written
    assert b"_paged_metadata" in written, "the graph that Enter opened"
    assert written.rindex(b"\x1b[?25h") > written.index(ENTERS), "the cursor is shown again"


@pytest.mark.slow
def test_bytes_that_arrive_at_once_are_handled_in_order(saved):
    written, code = show("inspect", saved, keys=(b"jjj\r+GksSc+mb?\x1b", b"\x1b", b"q"))
    assert code == 0
    assert b"Traceback" not in written
    assert written.count(LEAVES) == 1


@pytest.mark.slow
def test_colours_are_those_of_the_terminal_and_no_color_has_none(saved):
    coloured, _ = show("inspect", saved, keys=(b"j", b"q"))
    plain, code = show("inspect", saved, keys=(b"j", b"q"), NO_COLOR="1")
    assert COLOUR.findall(coloured), "a mode that fell back is yellow"
    assert b"38;2;" not in coloured, "no colours but the terminal's own, which suit its background"
    assert COLOUR.findall(plain) == []
    assert (code, b"TARGET_VERIFY" in plain) == (0, True)


@pytest.mark.parametrize(
    ("words", "environment"),
    [((), {"TERM": "dumb"}), ((), {"TERM": "unknown"}), (("--plain",), {"NO_COLOR": "1"})],
)
def test_text_is_printed_where_a_screen_is_impossible_or_unwanted(saved, words, environment):
    written, code = show("inspect", saved, *words, **environment)
    assert code == 0
    assert ENTERS not in written
    assert COLOUR.findall(written) == []
    assert b"mode and size" in written


def test_plain_text_has_no_styles_and_no_pictures_for_a_screen_reader(saved):
    written, code = show("inspect", saved, "--plain", "--by", "time")
    assert (code, b"\x1b" in written) == (0, False)
    assert written.isascii()
    assert b"_paged_attention" in written


def test_a_pipe_on_either_end_gets_text(saved):
    words = [sys.executable, "-m", "graphkit", "inspect", str(saved)]
    piped = subprocess.run(words, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert b"\x1b" not in piped.stdout
    assert (b"mode and size" in piped.stdout, piped.stderr) == (True, b"")
    written, code = show("inspect", saved, stdin=subprocess.DEVNULL)
    assert (code, ENTERS in written, b"mode and size" in written) == (0, False, True)


def test_a_reader_that_leaves_early_leaves_no_traceback(saved):
    command = f"{sys.executable} -m graphkit inspect {saved} | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("tiny")
    assert "Traceback" not in done.stderr
