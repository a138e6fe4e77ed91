"""Compiled kernels as the driver describes them: names, parameters, and the arguments of nodes.

``torch._C._demangle`` is a private name of torch, checked on 2.11 and 2.13.

A compiled kernel keeps the sizes of its parameters, not their names. Triton and torch.compile keep
the names in Python objects, beside the handle of the loaded function. Their attributes are private:
checked on Triton 3.6 and 3.7. With another version, parameters have no names.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch

from graphkit.graphs.driver import checked
from graphkit.graphs.tracked_objects import find_objects
from graphkit.graphs.walk.arguments import Parameter

_FUNCTOR = re.compile(r"(\w*?)(?:Functor|_functor|Ops)(?:OnSelf)?(_\w+)?<")
_LAUNCHER = re.compile(
    r"(\w+?)(?:_kernel(?:_cuda|_impl|_opmath)*|(?:CUDA)?Kernel(?:CUDA)?(?:Impl)?)(?:<[^()<>]*>)?\("
)
_WRAPPERS = ("Binary", "AUnary", "BUnary", "CUDA", "gpu", "Reduce")
"""Functors of torch that wrap the one of the operation."""
_GENERIC = re.compile(r"elementwise|reduce_kernel|index_kernel|gpu_kernel|unrolled")
"""Kernels that torch uses for many operations; a template argument names the operation."""


@cache
def demangled(name: str) -> str:
    """Return a symbol as in its source; other names unchanged."""
    return str(torch._C._demangle(name)) if name.startswith("_Z") else name


@cache
def short_name(name: str) -> str:
    """Return a demangled name without return type, namespaces, templates and arguments.

    A generic kernel of torch keeps its operation: ``vectorized_elementwise_kernel[silu]``.
    """
    plain = name.replace("(anonymous namespace)::", "").replace("{lambda(", "{lambda ")
    base = _without_templates(plain).split("(")[0].split(" ")[-1].split("::")[-1]
    operation = _operation(plain) if _GENERIC.search(base) else ""
    return f"{base}[{operation}]" if operation else base or name


def _without_templates(name: str) -> str:
    kept, depth = [], 0
    for letter in name.replace("operator<", "operator").replace("->", ""):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            kept.append(letter)
    return "".join(kept)


def _operation(name: str) -> str:
    """Return the operation that a generic kernel's template arguments name, or nothing."""
    inside = name[name.find("<") :]
    launchers = [names for names in _LAUNCHER.findall(inside) if names not in _WRAPPERS]
    functors = [after.strip("_") or before for before, after in _FUNCTOR.findall(inside)]
    names = launchers + [functor for functor in functors if functor not in _WRAPPERS]
    return names[0] if names else ""


_JIT, _STATIC = "CompiledKernel", "StaticallyLaunchedCudaKernel"
"""Classes of Triton and of torch.compile that hold a loaded function."""
_SCRATCH = ("global_scratch", "profile_scratch")
"""Parameters that Triton appends to those of the kernel's Python function."""

_known: dict[tuple[int, str], tuple[str, ...]] = {}
"""Names without ``_SCRATCH`` by handle and name; empty for a kernel that Triton did not compile.

The name is a part of the key because handles are used again after a module was unloaded.
"""


class TritonKernels:
    """Finds the names of kernels for one walk, which lists the objects of the process at most once.

    It lists them, in about 0.1 s, if it meets a new kernel with a plain C name.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[str, ...]] | None = None

    def parameter_names(self, function: int, name: str, count: int) -> Sequence[str]:
        """Return the names of the parameters of a ``CUfunction``; empty texts if unknown."""
        names = self._names(function, name) if name.isidentifier() else ()
        extra = count - len(names)
        is_whole = bool(names) and 0 <= extra <= len(_SCRATCH)
        return (*names, *_SCRATCH[:extra]) if is_whole else ("",) * count

    def _names(self, function: int, name: str) -> tuple[str, ...]:
        if (function, name) not in _known:
            if self._loaded is None:
                self._loaded = _loaded_kernels()
            _known[function, name] = self._loaded.get(function, ())
        return _known[function, name]


def _loaded_kernels() -> dict[int, tuple[str, ...]]:
    """Return the parameter names of all loaded kernels by the handles of their functions."""
    names: dict[int, tuple[str, ...]] = {}
    for kernel in find_objects(lambda kind: kind.__name__ in (_JIT, _STATIC)):
        # Compiled from a file, or of a version or a library with other attributes.
        with suppress(AttributeError, TypeError):
            if kernel.function is not None:
                names[kernel.function] = _argument_names(kernel)
    return names


def _argument_names(kernel: Any) -> tuple[str, ...]:
    """Return the names of the arguments that were not constants when the kernel was compiled.

    Raises:
        AttributeError, TypeError: The object does not have them.
    """
    if type(kernel).__name__ == _STATIC:
        constants = kernel.full_constexprs
        names = tuple(n for i, n in enumerate(kernel.arg_names) if i not in constants)
        return names if len(names) == len(kernel.arg_tys) else ()
    types, constants = kernel.src.signature, kernel.src.constants
    arguments = [
        name
        for i, name in enumerate(kernel.src.fn.arg_names)
        if types.get(name, "constexpr") != "constexpr" and (i,) not in constants
    ]
    if not all(isinstance(types[name], str) for name in arguments):
        return ()  # a tuple is several parameters
    return tuple(chain.from_iterable(_parameters(name, types[name]) for name in arguments))


def _parameters(name: str, kind: str) -> Sequence[str]:
    """Return the names of the parameters of an argument; ``kind`` is its type in a signature.

    A descriptor of a tensor (``tensordesc<u8[2, 16, 128],...>``) is one of CUDA, followed by the
    tensor's shape and strides.
    """
    if not kind.startswith("tensordesc"):
        return (name,)
    block, _, _ = kind.partition("[")[2].partition("]")
    sizes = [
        f"{field}[{axis}]" for field in ("shape", "strides") for axis in range(block.count(",") + 1)
    ]
    return (name, *(f"{name}.{size}" for size in sizes))


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
