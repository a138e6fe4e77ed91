"""Use of torch's dispatch modes by several threads, and beside torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch

DISPATCH_MODES = RLock()
"""Held while a dispatch mode of graphkit is active.

torch keeps part of a mode's state per process: if modes of two threads overlap, compiled functions
run eagerly from then on. The recorder waits for the lock. Attribution does not wait, because the
captures of two ranks may wait for each other.
"""


@contextmanager
def compilation_disabled() -> Iterator[None]:
    """Run compiled functions eagerly for a block, and keep what was compiled before.

    Enter it before a ``CaptureRulesMode``: torch cannot compile under a dispatch mode, and a
    compiled function that runs under one is never compiled again.
    """
    with DISPATCH_MODES:
        # Importing torch._dynamo takes a second; nothing is compiled before it is imported.
        is_loaded = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield
