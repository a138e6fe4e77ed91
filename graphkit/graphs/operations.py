"""Operations of torch as dispatch modes see them: their schemas, tensors and memory.

Private names of torch, checked on 2.11 and 2.13: ``torch._ops.OpOverload``, its ``_schema``, and
``_cdata`` of storages and generators. ``tests/unit/test_private_names.py`` names what
another version changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

OpOverload: TypeAlias = torch._ops.OpOverload
"""An operation with its types of arguments, such as ``aten::mm.default``."""
Operand = tuple[int, int]
"""Address of a tensor's first element, and its ``distinct_bytes``."""


def schema(op: OpOverload) -> Any:
    """Return the schema of an operation: name, arguments and results, with what they alias."""
    return op._schema


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation.

    These nest in lists, tuples and dicts alone: a search of pytrees takes several times as long.
    """
    tensors: list[torch.Tensor] = []
    _add_tensors((value,), tensors)
    return tensors


def _add_tensors(values: Iterable[Any], tensors: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _add_tensors(value, tensors)
        elif isinstance(value, dict):
            _add_tensors(value.values(), tensors)


def operands_in(values: Any) -> Iterator[Operand]:
    """Yield the memory of each dense tensor in arguments and results, at any depth."""
    for tensor in tensors_in(values):
        if has_storage(tensor):
            yield tensor.data_ptr(), distinct_bytes(tensor)


def arguments_written(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operation writes."""
    declared = schema(op).arguments
    names = (argument.name for argument in declared)
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in declared:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(passed.get(argument.name))


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's elements take at most: their number's or their extent's."""
    return tensor.nbytes if tensor.is_contiguous() else min(tensor.nbytes, extent_bytes(tensor))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in dimensions)) * tensor.element_size()


def storage_id(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a strided tensor while it exists."""
    return int(tensor.untyped_storage()._cdata)


def generator_id(generator: torch.Generator) -> int:
    """Return what identifies a generator: the dispatcher passes new Python objects for it."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dense one with memory of its own, and no subclass."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


class WriteMode(TorchDispatchMode):
    """Reports tensors before operations write them, but none that an operation in the mode made."""

    def __init__(self, on_write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_write, self._made = on_write, set[int]()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Report what an operation writes, and run it."""
        kwargs = kwargs or {}
        for tensor in arguments_written(func, args, kwargs):
            if has_storage(tensor) and storage_id(tensor) not in self._made:
                self._on_write(tensor)
        given = {storage_id(tensor) for tensor in tensors_in([args, kwargs]) if has_storage(tensor)}
        result = func(*args, **kwargs)
        made = {storage_id(tensor) for tensor in tensors_in([result]) if has_storage(tensor)}
        self._made |= made - given
        return result
