"""Control of Python's garbage collector during captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect once, then disable the garbage collector for a block.

    A collection may free device memory, which CUDA refuses during a capture. Does nothing if the
    collector is already disabled, so nested blocks collect once: a collection takes about 100 ms
    in a large process.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
