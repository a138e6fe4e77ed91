"""One recorded operation, and how a replay runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphkit.graphs.capture_state import disable_autocast
from graphkit.graphs.operations import OpOverload, schema, tensors_in
from graphkit.graphs.pool_memory import UNINITIALISED
from graphkit.ops.registration import OPS

_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the collectives of ``torch.distributed``."""
_WRAPPER = "_c10d_functional::_wrap_tensor_autograd"
"""Wraps the tensor of a collective that may be running, and does nothing else."""


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation with the arguments of its capture.

    Attributes:
        op: The ATen or custom operation.
        args: Its positional arguments; tensors share the storage of the captured ones.
        kwargs: Its keyword arguments.
        results: The tensors whose storage it allocated; a replay writes them again.
        fresh: Indices of ``results`` among all tensors that the operation returned.
        with_grad: Whether gradients were enabled; some operations then return more tensors.
        facts: What the recorder knows of ``op``.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    fresh: tuple[int, ...]
    with_grad: bool
    facts: OpFacts

    def run(self) -> None:
        """Run the operation again into the same storages; see ``replay_context``.

        Does nothing for an operation that leaves its results uninitialised.
        """
        if self.facts.is_uninitialised:
            return
        args: Sequence[Any] = self.args
        kwargs = self.kwargs
        if self.facts.is_foreign:  # it may transpose or squeeze its argument in place
            args = [aliased(value) for value in args]
            kwargs = {name: aliased(value) for name, value in kwargs.items()}
        if self.with_grad:
            with torch.enable_grad():
                out = self.op(*args, **kwargs)
        else:
            out = self.facts.run(*args, **kwargs)
        if self.facts.is_collective:
            out = finished(self.op, out)
        if self.fresh:
            tensors = [out] if isinstance(out, torch.Tensor) else tensors_in(out)
            for index, result in zip(self.fresh, self.results, strict=True):
                _write(result, tensors[index])


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a recorder must know of an operation. Reading it from torch takes microseconds.

    Attributes:
        run: Runs it in a replay. graphkit's ops run their references: the capture has checked the
            arguments.
    """

    run: Callable[..., Any]
    is_uninitialised: bool
    is_foreign: bool
    is_collective: bool
    is_wrapper: bool
    changes_shape: bool
    is_mutable: bool
    may_reshape: bool


@cache
def op_facts(op: OpOverload) -> OpFacts:
    """Return what a recorder must know of an operation."""
    is_foreign = op.namespace not in ("aten", "graphkit")
    is_own = op.namespace == "graphkit"
    return OpFacts(
        run=OPS[schema(op).name.partition("::")[2]].reference if is_own else op,
        is_uninitialised=op.overloadpacket in UNINITIALISED,
        is_foreign=is_foreign,
        is_collective=op.namespace in _COLLECTIVES,
        is_wrapper=op.name() == _WRAPPER,
        changes_shape=torch.Tag.inplace_view in op.tags,
        is_mutable=schema(op).is_mutable,
        may_reshape=schema(op).is_mutable or is_foreign,
    )


@contextmanager
def replay_context() -> Iterator[None]:
    """Set inference mode on and autocast off, for a block that runs recorded operations.

    Results made under inference mode can only be written under it. What autocast did at capture is
    among the recorded operations.
    """
    with torch.inference_mode(), disable_autocast():
        yield


def _write(result: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a result; of expanded dimensions only their one row."""
    if 0 in result.stride():
        for dim in (i for i, stride in enumerate(result.stride()) if not stride):
            result, value = result.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    result.copy_(value)


def aliased(value: Any) -> Any:
    """Alias every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [aliased(part) for part in value] if type(value) in (list, tuple) else value


def finished(op: OpOverload, out: Any) -> Any:
    """Wait for a collective, as a stream of the device does, and return its result.

    Args:
        op: The collective.
        out: What it returned: tensors and a ``Work``, or the tensor of a functional collective.
    """
    if op.namespace == "c10d":
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.ScriptObject):
                result.wait()  # type: ignore[attr-defined]  # a Work
        return out
    if isinstance(out, list):
        return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in out]
    return torch.ops._c10d_functional.wait_tensor(out)
