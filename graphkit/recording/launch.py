"""Runs a program as plain Python would, and stands for it: signals in, exit code out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphkit.errors import ConfigError
from graphkit.recording.parts import FOLDER

STARTUP = Path(__file__).with_name("startup")
"""The folder whose sitecustomize every Python of the program runs."""

_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def run_python(words: Sequence[str], folder: Path) -> int:
    """Run ``python WORDS`` to its end; its processes write their parts into the folder.

    The program has our interpreter, its options, and all our open files. Signals that reach us go
    on to it, but for those of the terminal, which the terminal sends to both.

    Returns:
        The exit code; 128 and the signal's number if a signal ended it, as in a shell.

    Raises:
        ConfigError: Our interpreter was told to ignore PYTHONPATH, and so would the program's be.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ConfigError(
            "cannot record under python -E, -I or -S: the program would not find graphkit's hooks. "
            "Leave the option out."
        )
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), *words]  # type: ignore[attr-defined]
    heard = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        # A terminal reaches the program by our group; without one a group of its own has a signal
        # for ours come once, by us, and not twice.
        group: dict[str, Any] = {} if _has_terminal() else {"setpgroup": 0}
        child = os.posix_spawn(
            sys.executable, command, environment_for(folder), setsigmask=before, **group
        )
        return _wait(child, heard)
    finally:
        while signal.sigtimedwait(heard, 0):
            pass  # what came too late for the program is not for us either
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int, heard: set[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        # Another thread may have taken the news that the child ended: look at times.
        came = signal.sigtimedwait(heard, 0.5)
        if came and came.si_signo in _FORWARDED and came.si_code <= 0:  # else it is the kernel's
            os.kill(child, came.si_signo)


def environment_for(folder: Path) -> Mapping[str, str]:
    """Ours, and what has every Python under it write its parts to a folder."""
    path = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), FOLDER: str(folder)}


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
