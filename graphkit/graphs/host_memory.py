"""The bytes of the host's own memory that show in arguments of kernels.

Kernels of torch take structs by value, and part of a struct is often left unset: it then holds what
a call before left on the stack. Filling that part of the stack first makes such bytes the same from
capture to capture; filling it with something else tells them from what was meant. What calls in
between leave there all the same are mostly addresses of the host's memory, which no kernel can use.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from functools import cache
from pathlib import Path

OTHER_UNSET = 0xA5
"""What unset bytes hold in a capture that is to tell them from those that were set."""
_LOWEST = 1 << 32
_BYTES = 1 << 15
"""More than torch's deepest launch takes, and far less than a thread's stack."""


class _Filling(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _BYTES),)


# Any function will do: it is the call that lays its argument out on the stack.
_lay_out = ctypes.PyDLL(None).getpid
_lay_out.argtypes = (_Filling,)


def fill_stack(byte: int) -> None:
    """Leave ``byte`` in the stack below the caller, some thirty kilobytes of it."""
    _lay_out(_filling(byte))


@cache
def _filling(byte: int) -> _Filling:
    return _Filling.from_buffer_copy(bytes([byte]) * _BYTES)


class HostMemory:
    """The heap, the stacks, the code and all else of this process, as of now.

    Without a program's own code where that lies so low that sizes and counts look like it. Empty
    where the system does not tell, which is everywhere but on Linux.
    """

    def __init__(self) -> None:
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        ranges = sorted(_range(line) for line in lines if _is_told_from_numbers(line))
        self._begins, self._ends = [begin for begin, _ in ranges], [end for _, end in ranges]

    def holds(self, address: int) -> bool:
        """Whether a number is an address in it."""
        at = bisect_right(self._begins, address) - 1
        return at >= 0 and address < self._ends[at]


def _is_told_from_numbers(line: str) -> bool:
    """Whether a line, ``begin-end rights offset device inode ...``, lies high or is of no file."""
    return _range(line)[0] >= _LOWEST or line.split(maxsplit=5)[4] == "0"


def _range(line: str) -> tuple[int, int]:
    begin, end = line.split(maxsplit=1)[0].split("-")
    return int(begin, 16), int(end, 16)
