"""Runs a program under plain Python, forwards signals to it and returns its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from graphkit.audit.foreign.process_files import FOLDER_VARIABLE
from graphkit.errors import ConfigError

_ENTRY_POINT = "graphkit.autoload"
"""Module of the entry point that ``import torch`` calls in every process of the program."""
_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_CHILD_POLL_SECONDS = 0.5


def run_python(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> int:
    """Run ``python ARGUMENTS`` to its end; its processes write their graph files into the folder.

    The program gets this process's interpreter, interpreter options and open files. Signals sent
    to this process are forwarded, except those from the terminal, which reach the program directly.

    Returns:
        The exit code; 128 plus the signal's number if a signal ended the program, as in a shell.

    Raises:
        ConfigError: graphkit is not installed here, so that torch would not find its entry point.
    """
    if not any(one.module == _ENTRY_POINT for one in entry_points(group="torch.backends")):
        raise ConfigError(
            "cannot record: graphkit is not installed in this Python, so that `import torch` does "
            "not call it. Install it, as with `pip install -e .` in a checkout."
        )
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *options, *arguments]
    # The program may have switched entry points off for other packages.
    recording = {FOLDER_VARIABLE: str(folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    environment = {**os.environ, **recording, **variables}
    awaited = {*_FORWARDED, signal.SIGCHLD}
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        # A terminal signals the whole foreground group, so the program stays in it. Without a
        # terminal, a group of its own keeps a signal for this group from arriving twice.
        group: dict[str, Any] = {} if _has_terminal() else {"setpgroup": 0}
        child = os.posix_spawn(
            sys.executable, command, environment, setsigmask=mask_before, **group
        )
        return _wait(child, awaited)
    finally:
        while signal.sigtimedwait(awaited, 0):
            pass  # a signal that came too late for the program must not end this process
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def _wait(child: int, awaited: set[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        # A timeout, because another thread may consume SIGCHLD.
        received = signal.sigtimedwait(awaited, _CHILD_POLL_SECONDS)
        # A positive code comes from the kernel: the terminal has signalled the program as well.
        if received and received.si_code <= 0 and received.si_signo in _FORWARDED:
            os.kill(child, received.si_signo)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
