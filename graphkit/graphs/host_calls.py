"""Calls that move data between host and device on CUDA, seen while the device is the CPU.

A function mode sees the value of an argument, not how the call spells it: ``device="cpu"`` and
``device=x.device`` are equal on a CPU. The bytecode of the caller tells them apart. It changes
between versions of CPython (https://docs.python.org/3/library/dis.html); the positions of
instructions exist since 3.11 (PEP 657). Checked on 3.11 and 3.12;
``tests/unit/test_private_names.py`` names what another version changes.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from functools import cache
from numbers import Number
from types import CodeType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphkit.errors import CaptureCause
from graphkit.graphs.capture_failure import CaptureFailure
from graphkit.graphs.capture_rules import HOST_READS, assigns_tensor_by_mask
from graphkit.graphs.operations import OpOverload, storage_id
from graphkit.graphs.source_lines import caller_location


def caller_passes(literal: str, function: str) -> bool:
    """Return whether a literal is in the call of a function by the caller of this one's caller.

    Call it from ``__torch_function__``, whose caller is the code that calls torch.
    """
    caller = sys._getframe(2)
    return _has_literal(caller.f_code, caller.f_lasti, literal, function)


@cache
def _has_literal(code: CodeType, offset: int, literal: str, function: str) -> bool:
    """Return whether a literal follows a function's name in the lines of the call at an offset."""
    before = [step for step in dis.get_instructions(code) if step.offset <= offset]
    lines = before[-1].positions
    if lines is None or lines.lineno is None or lines.end_lineno is None:
        return False
    called, found = False, False
    for instruction in before:
        line = instruction.positions.lineno if instruction.positions else None
        if line is None or not lines.lineno <= line <= lines.end_lineno:
            continue
        if instruction.argval == function:
            called, found = True, False  # the arguments follow the function
        found = found or (called and instruction.argval == literal)
    return found


_CONSTRUCTORS = {
    torch.tensor: "torch.tensor",
    torch.as_tensor: "torch.as_tensor",
    torch.asarray: "torch.asarray",
    torch.Tensor.new_tensor: "Tensor.new_tensor",
}
"""Functions that copy Python or NumPy data, on CUDA from memory that is not pinned."""
_NAMES: dict[Any, str] = {
    **HOST_READS,
    **_CONSTRUCTORS,
    torch.Tensor.to: "Tensor.to",
    torch.Tensor.__setitem__: "Tensor.__setitem__",
}


class HostTensors:
    """The tensors of a recording that are in host memory when the same code runs on CUDA.

    A tensor belongs to the host if it is made of Python or NumPy data without ``device=``, made on
    a device that the call spells ``"cpu"``, or computed from such tensors alone. All other tensors
    belong to the device, and so do all that were made before the recording.
    """

    def __init__(self) -> None:
        # Strong references: the address of a freed storage may be used by a device tensor.
        self._tensors: dict[int, torch.Tensor] = {}

    def __contains__(self, value: object) -> bool:
        if not self._tensors or not isinstance(value, torch.Tensor):
            return False
        return _storage(value) in self._tensors

    @property
    def storages(self) -> frozenset[int]:
        """The storages of these tensors."""
        return frozenset(self._tensors)

    def add(self, tree: Any) -> None:
        """Add every tensor of a nested value."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._tensors[_storage(leaf)] = leaf

    def discard(self, tensor: torch.Tensor) -> None:
        """Remove a tensor and its views."""
        self._tensors.pop(_storage(tensor), None)

    def cause(self, op: OpOverload, args: tuple[Any, ...]) -> CaptureCause | None:
        """Return why CUDA refuses to combine host and device tensors; ``None`` if it does not."""
        if not self._tensors:
            return None
        name = op.overloadpacket.__name__
        if name == "copy_":
            crosses = (args[0] in self) != (args[1] in self)
        elif name.startswith(("index", "_index_put")) and len(args) > 1 and args[0] not in self:
            indices = args[1] if isinstance(args[1], (list, tuple)) else ()
            on_host = [
                index for index in indices if index in self and index.dim() and index.numel()
            ]
            if name == "index" and any(index.dtype is torch.bool for index in on_host):
                return CaptureCause.DATA_DEPENDENT_SHAPE
            crosses = bool(on_host)
        else:
            return None
        return CaptureCause.HOST_SYNCHRONISATION if crosses else None

    def hold_all(self, tree: Any) -> bool:
        """Return whether a nested value has tensors, all of which belong to the host."""
        if not self._tensors:
            return False
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return bool(tensors) and all(tensor in self for tensor in tensors)


class HostCallsMode(TorchFunctionMode):
    """Raises at calls that a CUDA capture refuses but whose dispatch on the CPU does not show it.

    Computes ``one_hot`` with ``num_classes`` as on CUDA, where the host does not check the values.

    Args:
        host: The recording's host tensors; the mode adds tensors that only a call identifies.

    Raises:
        CaptureFailure: With the cause, the function and the user's line.
    """

    def __init__(self, host: HostTensors) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = _named_device(args, kwargs)
        if device is None and func not in _NAMES and func is not functional.one_hot:
            return func(*args, **kwargs)
        # The recorder's device is the CPU as well: only a call that spells it means the host.
        on_host = device is not None and device.type == "cpu"
        on_host = on_host and caller_passes("cpu", getattr(func, "__name__", ""))
        cause = self._cause(func, args, kwargs, device, on_host)
        if cause is not None:
            raise CaptureFailure(cause, f"{_NAMES[func]} at {caller_location()}")
        if func is functional.one_hot:
            return _one_hot(*args, **kwargs)
        out = func(*args, **kwargs)
        if on_host:
            self._host.add(out)
        elif func in _CONSTRUCTORS and not self._stays_on_host(func, args, device):
            self._host.discard(out)  # empty, so it needs no copy to the device
        return out

    def _stays_on_host(self, func: Any, args: tuple[Any, ...], device: torch.device | None) -> bool:
        """Return whether a constructor that names no host device makes a host tensor."""
        if device is not None:
            return False
        return func is not torch.Tensor.new_tensor or args[0] in self._host

    def _cause(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device | None,
        on_host: bool,
    ) -> CaptureCause | None:
        if func in HOST_READS:
            waits = args[0] not in self._host
        elif func in _CONSTRUCTORS:
            waits = self._constructor_waits(func, args, kwargs, device, on_host)
        elif func is torch.Tensor.to:
            waits = self._copy_waits(args, kwargs, device, on_host)
        elif func is torch.Tensor.__setitem__:
            if assigns_tensor_by_mask(*args):
                return CaptureCause.DATA_DEPENDENT_SHAPE
            waits = self._assignment_waits(*args)
        else:
            return None
        return CaptureCause.HOST_SYNCHRONISATION if waits else None

    def _assignment_waits(self, tensor: torch.Tensor, index: Any, value: Any) -> bool:
        """Return whether ``tensor[index] = value`` copies a Python number to the device.

        It fills slices and masks without a copy.
        """
        if tensor in self._host or not isinstance(value, Number):
            return False
        parts = index if isinstance(index, tuple) else (index,)
        if any(_is_list_of_places(part) for part in parts):
            return True
        return len(parts) == tensor.dim() and all(type(part) is int for part in parts)

    def _constructor_waits(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device | None,
        on_host: bool,
    ) -> bool:
        is_method = func is torch.Tensor.new_tensor
        data = args[is_method] if len(args) > is_method else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, torch.Tensor):
            return device is not None and (data in self._host) != on_host
        leaves = tree_leaves(data)
        if any(isinstance(leaf, torch.Tensor) and leaf not in self._host for leaf in leaves):
            return True  # every value is read
        stays = on_host or self._stays_on_host(func, args, device)
        return not stays and any(getattr(leaf, "size", 1) for leaf in leaves)

    def _copy_waits(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device | None,
        on_host: bool,
    ) -> bool:
        other = next(
            (arg for arg in args[1:] if isinstance(arg, torch.Tensor)), kwargs.get("other")
        )
        if device is None and other is None:
            return False
        source, target = args[0] in self._host, on_host or other in self._host
        # A copy to the host that does not wait uses pinned memory.
        return source != target and (source or not kwargs.get("non_blocking"))


def _is_list_of_places(part: Any) -> bool:
    """Return whether a part of an index is a tensor or list of integers."""
    if isinstance(part, torch.Tensor):
        return part.dtype not in (torch.bool, torch.uint8)
    return isinstance(part, list) and not any(isinstance(value, bool) for value in part)


def _named_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device that a call names."""
    device = kwargs.get("device")
    if device is None:
        for arg in args[1:3]:
            if isinstance(arg, (str, torch.device)):
                device = arg
                break
        else:
            return None
    try:
        return torch.device(device)
    except RuntimeError:  # a string that is not a device
        return None


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        return functional.one_hot(tensor, num_classes)
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return storage_id(tensor)
