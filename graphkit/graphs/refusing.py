"""Raises at the first operation that a capture refuses, before it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.errors import CaptureCause
from graphkit.graphs.failures import CaptureFailure, is_mask, refusal_of
from graphkit.graphs.modes import MODES
from graphkit.graphs.places import caller_place

_READS_THE_DEVICE = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.cpu: "Tensor.cpu",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__format__: "Tensor.__format__",
    torch.Tensor.__repr__: "Tensor.__repr__",
}


@contextmanager
def as_written() -> Iterator[None]:
    """Run compiled functions as they are written, and leave what was compiled of them as it is.

    For a block around a ``RefusingMode``: torch cannot compile under one, and having met one, never
    again runs what it had compiled.
    """
    with MODES:
        # Nothing is compiled before this is loaded, which takes a second.
        is_loaded = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield


class RefusingMode(TorchDispatchMode):
    """A dispatch mode under which everything runs that may run inside a capture."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse or run one operation."""
        cause = refusal_of(func, args, kwargs or {})
        if cause is not None:
            raise CaptureFailure(cause, f"{func.name()} at {caller_place()}")
        return self.ran(func, args, kwargs or {})

    def ran(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation that was not refused."""
        return func(*args, **kwargs)


class HostReads(TorchFunctionMode):
    """Refuses what a CUDA capture refuses, but looks harmless to the dispatcher on the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS_THE_DEVICE:
            where = f"{_READS_THE_DEVICE[func]} at {caller_place()}"
            raise CaptureFailure(CaptureCause.HOST_SYNCHRONISATION, where)
        if func is torch.Tensor.__setitem__ and _puts_tensor_behind_mask(*args):
            where = f"Tensor.__setitem__ at {caller_place()}"
            raise CaptureFailure(CaptureCause.DATA_DEPENDENT_SHAPE, where)
        return func(*args, **(kwargs or {}))


def _puts_tensor_behind_mask(_target: Any, index: Any, value: Any) -> bool:
    """Whether rows are counted, as they are not for a number; to the CPU both are tensors."""
    indices = index if isinstance(index, tuple) else (index,)
    return isinstance(value, torch.Tensor) and any(is_mask(each) for each in indices)
