"""SIGINT and SIGTERM end any command with one line, the right exit code and a restored terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from graphkit.cli import main
from graphkit.cli.exits import Terminated, signals_as_exceptions, signals_as_exit
from terminals import on_terminal

RECORD = Path(__file__).parents[1] / "data" / "h200-capture.json"
SIGNALS = pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
WAITING = """
import os, sys, time
from graphkit.cli import inspect, main
from graphkit.cli.output import progress_on_stderr

def wait(_):
    with progress_on_stderr() as progress:
        progress(1, 2, "working")
        os.write(2, b"ready")  # print runs code of rich, which can swallow an exception
        for _ in range(600):  # a signal just before a sleep does not end it
            time.sleep(0.1)

inspect.load_record = wait
sys.exit(main(["inspect", "record.json"]))
"""
"""A command that shows a progress bar and then waits; it imports no torch, which takes seconds."""


def signalled(number, arguments, ready):
    """Run Python on a terminal, send a signal once ``ready`` is written; return output and code."""
    left = [number]

    def send(written, _terminal, command, _is_quiet):
        if left and ready in written:
            command.send_signal(left.pop())

    return on_terminal(arguments, send)


@SIGNALS
def test_a_signal_ends_a_command_and_restores_the_cursor(number, code, text):
    written, ended = signalled(number, ("-c", WAITING), b"ready")
    assert ended == code, written.decode(errors="replace")
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l"), "the cursor is visible"
    assert written.endswith(f"\r\nerror: {text}\r\n".encode())
    assert b"Traceback" not in written


@pytest.mark.slow
@SIGNALS
def test_a_signal_ends_the_screen_and_restores_the_terminal(number, code, text):
    screen = ("-m", "graphkit", "inspect", RECORD)
    written, ended = signalled(number, screen, b"reference model")
    assert ended == code, written.decode(errors="replace")
    assert written.count(b"\x1b[?1049h") == written.count(b"\x1b[?1049l") == 1
    assert written.endswith(f"error: {text}\r\n".encode())
    assert b"Traceback" not in written


@SIGNALS
def test_a_signal_in_a_pipe_is_one_line(run, monkeypatch, number, code, text):
    def send(_):
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr("graphkit.cli.inspect.load_record", send)
    ended = run("inspect", RECORD)
    assert (ended.code, ended.out, ended.err) == (code, "", f"error: {text}\n")


SENDS = """
import os, signal
import graphkit as gk

def interrupts(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)

def in_sample_batch(device):
    from {module} import right
    import dataclasses
    return dataclasses.replace(right, sample_batch=interrupts)

def in_forward(device):
    from {module} import right
    import dataclasses
    return dataclasses.replace(right, forwards=dict.fromkeys(right.forwards, interrupts))
"""
"""Targets that send SIGINT to this process at different stages of a capture."""


@pytest.fixture
def interrupted_targets(tiny, here):
    name = f"{tiny}_sends"
    (here / f"{name}.py").write_text(SENDS.replace("{module}", tiny))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("command", "attribute"),
    [
        (command, attribute)
        for command in (("capture",), ("inspect", "--json"), ("audit",))
        for attribute in ("interrupts", "in_sample_batch", "in_forward")
    ]
    + [(("audit", "--lock", "out.json"), attribute) for attribute in ("interrupts", "in_forward")],
)
def test_a_command_with_a_target_can_be_interrupted(
    run, interrupted_targets, here, command, attribute
):
    ended = run(command[0], f"{interrupted_targets}:{attribute}", *command[1:])
    assert (ended.code, ended.out) == (130, "")
    assert ended.error == "error: interrupted"
    assert not (here / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "patched"),
    [
        (("inspect", RECORD), "graphkit.cli.inspect.load_record"),
        (("inspect", RECORD, "--plain"), "graphkit.views.text.inspect.inspect_view"),
        (("diff", RECORD, RECORD), "graphkit.cli.diff.load_record"),
        (("diff", RECORD, RECORD), "graphkit.cli.diff.diff_records"),
        (("export", RECORD, "--out", "out.html"), "graphkit.cli.export.load_record"),
        (("export", RECORD, "--out", "out.html"), "graphkit.cli.export.write_output"),
        (("record", __file__, "--out", "out.json"), "graphkit.audit.foreign.record_program"),
        (("generate", "--prompt", "a"), "graphkit.cli.run_generate.complete"),
        (("doctor",), "graphkit.cli.doctor._facts"),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_every_other_command_can_be_interrupted(run, here, monkeypatch, arguments, patched):
    monkeypatch.setattr(patched, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    ended = run(*arguments)
    assert (ended.code, ended.out, ended.err) == (130, "", "error: interrupted\n")
    assert list(here.iterdir()) == []


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As under ``nohup``, or in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with signals_as_exceptions():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_forked_child_is_terminated_by_default():
    with signals_as_exceptions():
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                os._exit(0)  # reached only if the signal was raised as an exception
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_an_event_loop_ends_before_the_signal_is_raised():
    ended = []

    async def wait():
        left = asyncio.Event()
        leave.append(left.set)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(left.wait(), 300)
        ended.append(True)

    def run():
        with signals_as_exit(lambda: leave[0]()):
            asyncio.run(wait())

    leave = []
    with pytest.raises(Terminated):
        run()
    assert ended == [True]
