"""Signals to the command, its group or its terminal reach the program once; the record is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

NOTE_SIGNALS = """
import os, signal, sys, time
from fake_capture import capture

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
"""Two signals merge if the first is still pending, so a doubled one shows only in some of many."""


@pytest.fixture
def noting(program, here, graphs_in):
    """Return a context manager that records a program which notes its signals."""

    @contextmanager
    def run(wrap=list, **settings):
        with subprocess.Popen(
            wrap([sys.executable, "-m", "graphkit", "record", program(NOTE_SIGNALS)]),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            **settings,
        ) as started:  # fmt: skip
            assert started.stdout.readline() == "ready\n"
            yield started
            (here / "stop").touch()
            _, err = started.communicate(timeout=120)
        assert err == "recorded 1 graph of 1 process: wrote graphkit-record.json\n"
        assert started.returncode == 7
        assert graphs_in() == [("before", 0)]

    return run


@pytest.fixture
def seen(here):
    """Return ``seen()``: the signals that the program has noted."""
    return lambda: (here / "seen").read_text().split()


@pytest.fixture
def send_repeatedly(seen):
    """Return a function that sends a signal again each time that the program has noted it."""

    def repeat(send):
        for _ in range(TIMES):
            before, end = len(seen()), time.monotonic() + 10
            send()
            while len(seen()) == before and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(0.03)

    return repeat


def test_a_signal_to_the_command_reaches_the_program(noting, send_repeatedly, seen):
    with noting() as started:
        send_repeatedly(lambda: started.send_signal(signal.SIGINT))
        send_repeatedly(lambda: started.send_signal(signal.SIGUSR1))
    assert seen() == ["SIGINT"] * TIMES + ["SIGUSR1"] * TIMES


def test_a_signal_to_the_group_reaches_the_program_once(noting, send_repeatedly, seen):
    with noting() as started:
        send_repeatedly(lambda: os.killpg(started.pid, signal.SIGINT))
    assert seen() == ["SIGINT"] * TIMES


def test_ctrl_c_on_a_terminal_reaches_the_program_once(noting, send_repeatedly, seen):
    """The terminal signals both, because both are in its foreground group."""
    main_end, its_end = os.openpty()

    def at_terminal(record):
        # The first terminal that the leader of a new session opens becomes its own.
        opens = f"import os; os.close(os.open({os.ttyname(its_end)!r}, os.O_RDWR))"
        return [sys.executable, "-c", f"{opens}; os.execv({sys.executable!r}, {record!r})"]

    with noting(at_terminal, stdin=its_end):
        send_repeatedly(lambda: os.write(main_end, b"\x03"))
    os.close(main_end)
    os.close(its_end)
    assert seen() == ["SIGINT"] * TIMES


def test_sigterm_ends_the_program_and_keeps_the_record(program, graphs_in):
    command = [sys.executable, "-m", "graphkit", "record", program(NOTE_SIGNALS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "ready\n"
        started.terminate()
        assert started.wait(timeout=120) == 128 + signal.SIGTERM
    assert graphs_in() == [("before", 0)]
