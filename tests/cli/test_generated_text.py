"""Generated text on stdout and its measurements on stderr, without a model."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from graphkit.cli.generate_texts import count_tokens, print_generated, stream_text
from graphkit.records import Completion, Environment, GenerateRecord
from graphkit.views import generate_view, visible

RECORD = GenerateRecord(
    text="é\n",
    completions=(
        Completion(prompt="a", text="é\n", finish_reason="stop token", tokens=4, accept_length=2.5),
        Completion(
            prompt="b", text="\x1b]", finish_reason="max_new_tokens", tokens=8, accept_length=3.0
        ),
    ),
    environment=Environment(
        device="Imaginary [h200]", torch="2.11.0", triton="3.6", cuda="13.0", driver="580",
        graphkit="0",
    ),
    backend="cuda",
    algorithm="EAGLE",
    topk=2,
    num_steps=3,
    num_draft_tokens=8,
    generation="v2",
    temperature=0.7,
    seed=0,
    new_tokens=12,
    seconds=0.05,
    tokens_per_second=240.0,
    accept_length=2.75,
    capture_seconds=1.234,
    replays={"TARGET_VERIFY": 3, "DRAFT": 1, "DRAFT_EXTEND_V2": 0},
    accepted_lengths={1: 1, 3: 2},
    fallbacks={"DRAFT_EXTEND_V2": {"not captured": 1, "batch too large": 2}},
)  # fmt: skip
FACTS = """\
algorithm        EAGLE, topk 2, num_steps 3,
                 num_draft_tokens 8, v2, temperature 0.7
device           Imaginary [h200], cuda backend, torch
                 2.11.0
output           12 tokens in 0.05 s
ended by         stop token (1), max_new_tokens (1)
speed            240.0 tokens/s
accept length    2.75
accepted         1 token: 1x, 3 tokens: 2x
capture          1.23 s
graphs           TARGET_VERIFY: 3 replays
                 DRAFT: 1 replay
without a graph  DRAFT_EXTEND_V2: 1 run, not captured
                 DRAFT_EXTEND_V2: 2 runs, batch too large
"""


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return ``printed(is_terminal, ...)``: what is written to stdout and stderr."""

    def print_record(is_terminal, **options):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
        print_generated(RECORD, **{"as_json": False, "is_printed": False} | options)
        return capsys.readouterr()

    return print_record


def test_a_pipe_gets_the_texts_unchanged_and_without_the_measurements(printed):
    out, err = printed(False)
    assert out == "é\n\n\x1b]\n"
    assert err.startswith("algorithm ")


def test_a_terminal_gets_the_texts_after_their_dimmed_prompts(printed):
    out, err = printed(True)
    assert out == "\x1b[2ma\x1b[0mé\n\n\x1b[2mb\x1b[0m\\x1b]\n"
    assert err.startswith("\nalgorithm ")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour_gets_no_escape_codes(printed, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert printed(True).out == "aé\n\nb\\x1b]\n"


def test_a_streamed_text_is_not_printed_again(printed):
    out, err = printed(True, is_printed=True)
    assert (out, err.split()[0]) == ("", "algorithm")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_json_is_the_only_output(printed, is_terminal):
    assert printed(is_terminal, as_json=True) == (RECORD.to_json(), "")


def test_streaming_shows_the_prompt_first_and_ends_its_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with stream_text(["a\x1b"], 9) as on_text:
        assert capsys.readouterr().out == "\x1b[2ma\\x1b\x1b[0m"
        on_text("b\x1b", 2)
        assert capsys.readouterr().out == "b\\x1b"
    assert capsys.readouterr().out == "\n"


def test_a_reply_starts_a_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_generated(replace(RECORD, is_chat=True), as_json=False, is_printed=False)
    assert capsys.readouterr().out.startswith("\x1b[2ma\n\x1b[0mé\n")


def test_counting_writes_nothing_to_stdout(capsys):
    with count_tokens(["a", "b"], 4) as on_text:
        on_text("ab", 2)
        on_text("", 1)
    assert capsys.readouterr().out == ""


def test_control_characters_other_than_newline_and_tab_are_escaped():
    for code in {*range(0x20), *range(0x7F, 0xA0)} - {*b"\n\t"}:
        assert visible(f"a{chr(code)}b") == f"a\\x{code:02x}b"
    assert visible("a\n\tb") == "a\n\tb"


def test_other_characters_are_unchanged():
    assert visible("aé日\u2028\u00a0\\x1b") == "aé日\u2028\u00a0\\x1b"


def test_an_encoding_without_the_character_gets_an_escape(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print_generated(RECORD, as_json=False, is_printed=False)
    sys.stdout.seek(0)
    assert sys.stdout.read() == "\\xe9\n\n\x1b]\n"


def shown(record, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(generate_view(record))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_filters_are_shown_with_a_temperature():
    filtered = replace(RECORD, top_k=5, top_p=0.9, min_p=0.05)
    assert "temperature 0.7, top_k 5, top_p 0.9, min_p 0.05\n" in shown(filtered, 200)
    assert "top_k" not in shown(replace(filtered, temperature=0.0), 200)


def test_processors_are_shown_at_any_temperature():
    assert "penalty" not in shown(RECORD, 200)
    processed = replace(RECORD, temperature=0.0, repetition_penalty=1.3, presence_penalty=-0.5,
                        frequency_penalty=0.25, min_tokens=4)  # fmt: skip
    text = "repetition_penalty 1.3, presence_penalty -0.5, frequency_penalty 0.25, min_tokens 4\n"
    assert text in shown(processed, 200)


def test_the_measurements_on_a_narrow_terminal():
    assert shown(RECORD, 60) == FACTS


@pytest.mark.parametrize("width", [20, 30, 60, 200])
def test_no_measurement_is_wider_than_the_terminal(width):
    assert max(map(len, shown(RECORD, width).splitlines())) <= width
