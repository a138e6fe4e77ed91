"""The operations that a CUDA graph capture refuses, and a dispatch mode that refuses them.

During a capture, CUDA refuses to wait for the device, so the host cannot read its values. A graph
has static shapes, so no shape may depend on values of the device. See "CUDA Graphs" in the notes of
PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.errors import CaptureCause
from graphkit.graphs.capture_failure import CaptureFailure
from graphkit.graphs.operations import OpOverload, generator_id, tensors_in
from graphkit.graphs.source_lines import caller_location

HOST_READS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.cpu: "Tensor.cpu",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__format__: "Tensor.__format__",
    torch.Tensor.__repr__: "Tensor.__repr__",
}
"""Methods that wait for the device on CUDA. On the CPU they dispatch no operation that shows it."""


class CaptureRulesMode(TorchDispatchMode):
    """Raises at the first operation that a capture refuses, before the operation runs.

    Args:
        device_type: The type of the capture's device. Operations on tensors of other devices alone
            are accepted.

    Raises:
        CaptureFailure: With the cause, the operation and the user's line.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper of ``__torch_dispatch__``; see ``compilation_disabled``.

        A hook of torch's modes without documentation, checked on 2.11 and 2.13.
        """
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse or run one operation."""
        cause = self.cause(func, args, kwargs or {})
        if cause is not None:
            raise CaptureFailure(cause, f"{func.name()} at {caller_location()}")
        return self.run_allowed(func, args, kwargs or {})

    def cause(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CaptureCause | None:
        """Return why a capture refuses this operation; ``None`` if it accepts it."""
        if self._is_elsewhere(args, kwargs):
            return None
        generator = kwargs.get("generator")
        if generator is not None and self._is_unregistered(generator):
            return CaptureCause.UNSUPPORTED_OP
        return capture_cause(func, args, kwargs)

    def run_allowed(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation that a capture accepts."""
        return func(*args, **kwargs)

    def _is_elsewhere(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operation has tensors, none of them on the capture's device."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.device.type == self._device_type:
            return False
        tensors = tensors_in((args, kwargs))
        if not tensors or any(tensor.device.type == self._device_type for tensor in tensors):
            return False
        target = kwargs.get("device")  # of a copy
        return target is None or torch.device(target).type != self._device_type

    def _is_unregistered(self, generator: torch.Generator) -> bool:
        """Return whether a generator is one of the device, other than its default one."""
        if generator.device.type != self._device_type:
            return False
        on_cuda = self._device_type == "cuda"
        defaults = torch.cuda.default_generators if on_cuda else (torch.default_generator,)
        return generator_id(generator) not in map(generator_id, defaults)


def capture_cause(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CaptureCause | None:
    """Return why a capture refuses this operation; ``None`` if it accepts it."""
    name, reads_values, has_dynamic_shape = _op_facts(op)
    if reads_values or _kernel_waits(name, args, kwargs):
        return CaptureCause.HOST_SYNCHRONISATION
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        # Integer indices give a static shape, boolean ones a number of rows known on the device.
        counts = any(map(_is_mask, args[1])) and not _fills(*args[1:4])
        return CaptureCause.DATA_DEPENDENT_SHAPE if counts else None
    if name in ("_to_copy", "copy_") and _copies_and_waits(name, args, kwargs):
        return CaptureCause.HOST_SYNCHRONISATION
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    return CaptureCause.DATA_DEPENDENT_SHAPE if has_dynamic_shape else None


@cache
def _op_facts(op: OpOverload) -> tuple[str, bool, bool]:
    """Return the name of an operation, and whether it reads values or has a dynamic shape."""
    name = op.overloadpacket.__name__
    has_dynamic_shape = torch.Tag.dynamic_output_shape in op.tags or name == "_to_sparse"
    return name, torch.Tag.data_dependent_output in op.tags, has_dynamic_shape


def _kernel_waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the CUDA implementation of an operation reads values on the host."""
    if name == "_grouped_mm":  # all types but bfloat16 run one product per group
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        return offsets is not None and args[0].dtype is not torch.bfloat16
    if name == "histc":
        low, high = args[2] if len(args) > 2 else 0, args[3] if len(args) > 3 else 0
        return bool(kwargs.get("min", low) == kwargs.get("max", high))  # reads the range
    if name in ("linspace", "logspace"):
        return any(isinstance(arg, torch.Tensor) for arg in args[:2])
    return name == "_linalg_check_errors"


def _copies_and_waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy crosses host and device and makes the host wait for it."""
    if name == "copy_":
        target, waits = args[0].device, not (args[2] if len(args) > 2 else False)
        return waits and target.type != args[1].device.type
    target = torch.device(kwargs.get("device") or args[0].device)
    return not kwargs.get("non_blocking") and target.type != args[0].device.type


def _is_mask(index: Any) -> bool:
    """Return whether an index selects as many rows as it has true values."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fills(indices: Any, values: torch.Tensor | None = None, accumulate: bool = False) -> bool:
    """Return whether a host number is assigned by one mask, which torch runs as masked_fill."""
    is_number = values is not None and values.dim() == 0 and values.device.type == "cpu"
    return is_number and not accumulate and sum(index is not None for index in indices) == 1


def assigns_tensor_by_mask(_target: Any, index: Any, value: Any) -> bool:
    """Return whether a tensor is assigned by a mask; to the dispatcher a number is one as well."""
    indices = index if isinstance(index, tuple) else (index,)
    return isinstance(value, torch.Tensor) and any(map(_is_mask, indices))
