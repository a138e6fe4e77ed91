"""Commands on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

PATIENCE = 60
"""Seconds until a command is ended."""


def on_terminal(arguments, act=lambda *_: None, *, stdin=None, **environment):
    """Run Python on a terminal of 80 x 24.

    Args:
        arguments: Those of Python.
        act: Called again and again with what is written so far, the terminal, the process, and
            whether nothing more is written for now.
        stdin: Input that is not the terminal.
        environment: Further variables.

    Returns:
        What the command wrote, and its exit code.
    """
    main_end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=its_end if stdin is None else stdin, stdout=its_end, stderr=its_end,
        start_new_session=True, env={**os.environ, **environment},
    )  # fmt: skip
    os.close(its_end)
    written, deadline = b"", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        more = select.select([main_end], [], [], 0.2)[0]
        if more:
            try:
                written += os.read(main_end, 1 << 16)
            except OSError:  # the command has closed the terminal
                break
        act(written, main_end, command, not more)
    os.close(main_end)
    try:
        return written, command.wait(timeout=120)
    finally:
        command.kill()
