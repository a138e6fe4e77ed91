"""Compiled kernels as the driver describes them, and the arguments of their nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from graphkit.graphs.driver import checked
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.kernel_names import demangled
from graphkit.graphs.walk.triton_kernels import TritonKernels

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE; 0 is CU_LAUNCH_PARAM_END."""


class Kernel:
    """A kernel's properties, which all of its nodes share. The driver is queried once for each.

    Args:
        driver: The module ``cuda.bindings.driver``.
        function: The node's ``CUfunction``; 0 if it has a ``CUkernel``.
        kernel: The node's ``CUkernel``, of a library that is loaded lazily.
        triton: Finds the names of parameters.
    """

    def __init__(self, driver: Any, function: Any, kernel: Any, triton: TritonKernels) -> None:
        self._driver, self._function, self._kernel = driver, function, kernel
        self._triton = triton
        self._is_function = bool(int(function))

    @cached_property
    def name(self) -> str:
        """Demangled name."""
        d = self._driver
        get = d.cuFuncGetName if self._is_function else d.cuKernelGetName
        return demangled(checked(get(self._handle))[0].decode())

    @cached_property
    def parameter_layout(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter, in bytes (``cuFuncGetParamInfo``)."""
        d = self._driver
        get = d.cuFuncGetParamInfo if self._is_function else d.cuKernelGetParamInfo
        layout: list[tuple[int, int]] = []
        while True:
            error, *extent = get(self._handle, len(layout))
            if int(error) != 0:
                return layout
            layout.append((int(extent[0]), int(extent[1])))

    @cached_property
    def parameter_names(self) -> Sequence[str]:
        """Name of each parameter of a Triton kernel; empty texts for other kernels."""
        count = len(self.parameter_layout)
        return self._triton.parameter_names(int(self._function), self.name, count)

    @cached_property
    def registers(self) -> int:
        """Registers per thread."""
        return self._attribute("NUM_REGS")

    @cached_property
    def static_shared_bytes(self) -> int:
        """Bytes of shared memory that it uses beside a launch's dynamic ones."""
        return self._attribute("SHARED_SIZE_BYTES")

    def parameters(self, pointers: int, extra: int) -> Iterator[Parameter]:
        """Yield the arguments of a node.

        They are given by an array of pointers, or in one buffer as cuBLAS does it.

        Args:
            pointers: Address in ``CUDA_KERNEL_NODE_PARAMS.kernelParams``, or 0.
            extra: Address in ``CUDA_KERNEL_NODE_PARAMS.extra``, or 0.
        """
        buffer = _buffer(extra) if extra and not pointers else None
        values = (
            (ctypes.c_void_p * len(self.parameter_layout)).from_address(pointers)
            if pointers
            else None
        )
        names = self.parameter_names
        for i, (offset, size) in enumerate(self.parameter_layout):
            data = None
            if values is not None and values[i]:
                data = ctypes.string_at(values[i] or 0, size)
            elif buffer is not None and offset + size <= len(buffer):
                data = buffer[offset : offset + size]
            yield Parameter(offset, size, data, names[i])

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
    """Return the argument buffer that an ``extra`` list of tags and values describes."""
    entries: dict[int, int] = {}
    at = extra
    while tag := _word(at):
        entries[tag] = _word(at + 8)
        at += 16  # a tag and a value of 8 bytes each
    if not {_BUFFER_POINTER, _BUFFER_SIZE} <= entries.keys():
        return None
    return ctypes.string_at(entries[_BUFFER_POINTER], _word(entries[_BUFFER_SIZE]))


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
