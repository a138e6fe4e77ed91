"""The bytes below the host's stack, which show in arguments of kernels.

Kernels of torch take structs by value, and part of a struct is often left unset: it then holds what
a call before left on the stack. Filling that part of the stack first makes such bytes the same from
capture to capture; filling it with something else tells them from what was meant.
"""

from __future__ import annotations

import ctypes
from functools import cache

OTHER_UNSET = 0xA5
"""What unset bytes hold in a capture that is to tell them from those that were set."""
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
