"""Parameter names of the Triton kernels that this process has loaded.

A compiled kernel keeps the sizes of its parameters, not their names. Triton and torch.compile keep
the names in Python objects, beside the handle of the loaded function. Their attributes are private:
checked on Triton 3.6 and 3.7. With another version, parameters have no names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from graphkit.graphs.tracked_objects import find_objects

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
        """Return the names of a kernel's parameters; empty texts if they are unknown.

        Args:
            function: Its ``CUfunction``.
            name: Its name.
            count: Number of its parameters.
        """
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
