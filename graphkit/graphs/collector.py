"""Python's garbage collector around captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect, then keep the collector off for a block: it may free device memory in a capture.

    Nothing is done where it is off already, so that of many captures in a block only the first
    waits for a collection, which takes some 100 ms in a large process.
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
