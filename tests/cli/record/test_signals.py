"""Signals reach the program once, whoever sends them to whom, and the record is still written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

NOTES = """
import os, signal, sys, time
from capturing import capture

seen = open("seen", "w", buffering=1)
for name in ("SIGINT", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda *_, name=name: print(name, file=seen))
capture("before")
print("ready", flush=True)
end = time.monotonic() + 20
while not os.path.exists("stop") and time.monotonic() < end:
    time.sleep(0.01)
sys.exit(7)
"""
TIMES = 8
"""A signal that comes again before it was handled is one: only some of many show a doubling."""


@pytest.fixture
def noting(program, here, graphs_in):
    """A block with the command around a program that notes its signals."""

    @contextmanager
    def run(words=list, **settings):
        with subprocess.Popen(
            words([sys.executable, "-m", "graphkit", "record", program(NOTES)]),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            **settings,
        ) as started:  # fmt: skip
            assert started.stdout.readline() == "ready\n"
            yield started
            (here / "stop").touch()
            _, err = started.communicate(timeout=30)
        assert err == "recorded 1 graph of 1 process: wrote graphkit-record.json\n"
        assert started.returncode == 7
        assert graphs_in() == [("before", 0)]

    return run


@pytest.fixture
def seen(here):
    """``seen()``: what the program noted so far."""
    return lambda: (here / "seen").read_text().split()


@pytest.fixture
def often(seen):
    """``often(send)``: sends it anew each time that it came through."""

    def repeat(send):
        for _ in range(TIMES):
            before, end = len(seen()), time.monotonic() + 10
            send()
            while len(seen()) == before and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(0.03)

    return repeat


def test_a_signal_for_the_command_reaches_the_program(noting, often, seen):
    with noting() as started:
        often(lambda: started.send_signal(signal.SIGINT))
        often(lambda: started.send_signal(signal.SIGUSR1))
    assert seen() == ["SIGINT"] * TIMES + ["SIGUSR1"] * TIMES


def test_a_signal_for_its_group_reaches_the_program_once(noting, often, seen):
    with noting() as started:
        often(lambda: os.killpg(started.pid, signal.SIGINT))
    assert seen() == ["SIGINT"] * TIMES


def test_control_c_of_a_terminal_reaches_the_program_once(noting, often, seen):
    """Both are in the terminal's foreground group, and it tells both."""
    ours, theirs = os.openpty()

    def at_terminal(record):
        # The leader of a new session makes the first terminal that it opens its own.
        opens = f"import os; os.close(os.open({os.ttyname(theirs)!r}, os.O_RDWR))"
        return [sys.executable, "-c", f"{opens}; os.execv({sys.executable!r}, {record!r})"]

    with noting(at_terminal, stdin=theirs):
        often(lambda: os.write(ours, b"\x03"))
    os.close(ours)
    os.close(theirs)
    assert seen() == ["SIGINT"] * TIMES


def test_a_request_to_end_ends_the_program_and_keeps_the_record(program, graphs_in):
    words = [sys.executable, "-m", "graphkit", "record", program(NOTES)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "ready\n"
        started.terminate()
        assert started.wait(timeout=30) == 128 + signal.SIGTERM
    assert graphs_in() == [("before", 0)]
