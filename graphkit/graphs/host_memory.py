"""Bytes of host memory that appear in the arguments of kernels.

torch passes structs to kernels by value and leaves parts of them unset: those bytes hold what an
earlier call left on the stack. Filling the stack before each operation makes the unset bytes equal
in every capture; filling it with a marker shows which bytes are unset. The bytes that calls in
between leave there are mostly addresses of host memory, which no kernel can use.

The stack filler relies on ctypes passing a large structure by value on the stack, as the System V
calling convention of x86-64 requires. Checked on x86-64 Linux with CPython 3.11 and 3.12, and its
effect on kernels with torch 2.11.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from functools import cache
from pathlib import Path

UNSET_MARKER = 0xA5
"""Fill of the stack in a capture that is compared to find unset bytes."""
_LOWEST = 1 << 32
"""Files mapped below look like sizes and counts; see ``HostMemory``."""
_FILL_BYTES = 1 << 15
"""Larger than the stack of torch's deepest launch, far smaller than a thread's stack (8 MiB)."""


class _Fill(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _FILL_BYTES),)


# Any function will do: passing the argument by value writes it to the stack.
_take_by_value = ctypes.PyDLL(None).getpid
_take_by_value.argtypes = (_Fill,)


def fill_stack(byte: int) -> None:
    """Write ``byte``, 0 to 255, to the 32 KiB of the stack below the caller's frame."""
    _take_by_value(_fill(byte))


@cache
def _fill(byte: int) -> _Fill:
    return _Fill.from_buffer_copy(bytes([byte]) * _FILL_BYTES)


class HostMemory:
    """The mapped memory of this process, as it is when the object is made.

    Files mapped below 4 GiB, such as a program's own code, are left out: sizes and counts look like
    their addresses. Empty on systems without ``/proc/self/maps``.
    """

    def __init__(self) -> None:
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        ranges = sorted(_range(line) for line in lines if _is_distinguishable(line))
        self._begins, self._ends = [begin for begin, _ in ranges], [end for _, end in ranges]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._begins, address) - 1
        return at >= 0 and address < self._ends[at]


def _is_distinguishable(line: str) -> bool:
    """Return whether a mapping is above 4 GiB or not of a file.

    Args:
        line: ``begin-end permissions offset device inode path``; see proc_pid_maps(5).
    """
    return _range(line)[0] >= _LOWEST or line.split(maxsplit=5)[4] == "0"


def _range(line: str) -> tuple[int, int]:
    begin, end = line.split(maxsplit=1)[0].split("-")
    return int(begin, 16), int(end, 16)
