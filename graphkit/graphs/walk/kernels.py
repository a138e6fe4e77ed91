"""A compiled kernel as the driver knows it, and the arguments that a node gives it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from graphkit.graphs.driver import checked
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.kernel_names import demangled

_PARAMETERS_AT, _PARAMETERS_SIZE = 1, 2
"""Tags of the driver's ``extra`` list (CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE); 0 ends it."""


class Kernel:
    """What all nodes of one kernel share; asked for once."""

    def __init__(self, driver: Any, function: Any, kernel: Any) -> None:
        self._driver, self._function, self._kernel = driver, function, kernel
        self._is_function = bool(int(function))

    @cached_property
    def name(self) -> str:
        """Demangled."""
        d = self._driver
        get = d.cuFuncGetName if self._is_function else d.cuKernelGetName
        return demangled(checked(get(self._handle))[0].decode())

    @cached_property
    def layout(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter."""
        d = self._driver
        get = d.cuFuncGetParamInfo if self._is_function else d.cuKernelGetParamInfo
        found: list[tuple[int, int]] = []
        while True:
            error, *place = get(self._handle, len(found))
            if int(error) != 0:
                return found
            found.append((int(place[0]), int(place[1])))

    @cached_property
    def registers(self) -> int:
        """Per thread."""
        return self._attribute("NUM_REGS")

    @cached_property
    def static_bytes(self) -> int:
        """Shared memory that it takes whatever a launch says."""
        return self._attribute("SHARED_SIZE_BYTES")

    def parameters(self, pointers: int, extra: int) -> Iterator[Parameter]:
        """Each argument's bytes: by an array of pointers, or out of one buffer (cuBLAS does so).

        Args:
            pointers: Address of a node's ``kernelParams``, or 0.
            extra: Address of its ``extra``, or 0.
        """
        buffer = _buffer(extra) if extra and not pointers else None
        places = (ctypes.c_void_p * len(self.layout)).from_address(pointers) if pointers else None
        for i, (offset, size) in enumerate(self.layout):
            data = None
            if places is not None and places[i]:
                data = ctypes.string_at(places[i] or 0, size)
            elif buffer is not None and offset + size <= len(buffer):
                data = buffer[offset : offset + size]
            yield Parameter(offset, size, data)

    @property
    def _handle(self) -> Any:
        return self._function if self._is_function else self._kernel

    def _attribute(self, name: str) -> int:
        d = self._driver
        which = getattr(d.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        if self._is_function:
            return int(checked(d.cuFuncGetAttribute(which, self._function))[0])
        device = checked(d.cuCtxGetDevice())[0]
        return int(checked(d.cuKernelGetAttribute(which, self._kernel, device))[0])


def _buffer(extra: int) -> bytes | None:
    """The buffer in a list of tags and values that a 0 ends."""
    entries: dict[int, int] = {}
    at = extra
    while tag := _word(at):
        entries[tag] = _word(at + 8)
        at += 16
    if not {_PARAMETERS_AT, _PARAMETERS_SIZE} <= entries.keys():
        return None
    return ctypes.string_at(entries[_PARAMETERS_AT], _word(entries[_PARAMETERS_SIZE]))


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
