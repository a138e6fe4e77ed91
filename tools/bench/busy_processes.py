"""Processes that keep the cores busy, as other work on a shared machine does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A process also ends when its parent has ended.
_SPIN = """
import os, sys
parent = os.getppid()
sys.stdout.write("ready\\n")
sys.stdout.flush()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that never sleep, for a block. All of them run when the block begins."""
    command = [sys.executable, "-S", "-c", _SPIN]
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            processes += [subprocess.Popen(command, stdout=subprocess.PIPE, text=True)]
        for process in processes:
            assert process.stdout is not None, "it is a pipe"
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
