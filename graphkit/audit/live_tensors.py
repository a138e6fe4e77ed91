"""Find the tensor of this process that an address belongs to, and where it is held.

Libraries such as cuBLAS keep a workspace for each stream in memory of torch's allocator. No tensor
refers to it, so a target cannot declare it; it lives as long as the process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch

from graphkit.audit.holders import attribute_holders, shape_text
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.graphs.operations import tensors_in
from graphkit.graphs.recorded_graph import RecordedOp
from graphkit.graphs.tracked_objects import find_objects


class LiveTensors:
    """Storages of all tensors of this process, as of the first query.

    The scan takes about 100 ms in a large process, so it waits for the first query.

    Args:
        roots: Forwards by name; tensors that they reach are named after them.
        ignored: Tensors that do not count, such as views that an audit makes.
    """

    def __init__(
        self, roots: Mapping[str, Any] | None = None, ignored: Iterable[torch.Tensor] = ()
    ) -> None:
        self._roots, self._ignored = roots or {}, list(ignored)

    def contain(self, address: int) -> bool:
        """Return whether an address is in the storage of a tensor."""
        return _is_in(self._ranges, address)

    def contain_unrecorded(self, address: int) -> bool:
        """Return the same without tensors that only the recorder's graphs refer to."""
        return _is_in(self._unrecorded, address)

    def names(self, addresses: Sequence[int]) -> list[str]:
        """Return where the tensor of each address is held, or its dtype and shape.

        A name is an attribute path, a closure variable or a module global, such as
        ``Model.layers.0.weight``, ``forward.mask`` or ``engine.TABLE``. It is empty if no tensor
        holds the address.
        """
        reached = [self._reached(address) for address in addresses]
        tensors = {
            address: views[0]
            for address, name in zip(addresses, reached, strict=True)
            if not name and (views := self.tensors_at(address))
        }
        held = attribute_holders(list(tensors.values()))
        others = {
            address: held[id(tensor)][0].name if id(tensor) in held else shape_text(tensor)
            for address, tensor in tensors.items()
        }
        pairs = zip(addresses, reached, strict=True)
        return [name or others.get(address, "") for address, name in pairs]

    def storages(self) -> list[tuple[int, int]]:
        """Return beginning and end of the storage of each tensor, ascending."""
        return sorted(set(_storages(self._unrecorded_tensors)))

    def tensors_at(self, address: int) -> Sequence[torch.Tensor]:
        """Return the tensors on the storage that holds an address; empty if none does."""
        return _at(self._tensors, address, ())

    @cached_property
    def _tensors(self) -> _Storages[Sequence[torch.Tensor]]:
        """The tensors on each storage."""
        by_begin: dict[int, tuple[int, list[torch.Tensor]]] = {}
        for tensor in self._unrecorded_tensors:
            for begin, end in _storages([tensor]):
                by_begin.setdefault(begin, (end, []))[1].append(tensor)
        return sorted(by_begin), by_begin

    def _reached(self, address: int) -> str:
        """Return the path by which a forward reaches an address; empty if none does."""
        return _at(self._names, address, "")

    @cached_property
    def _names(self) -> _Storages[str]:
        """The first path by which forwards reach each storage."""
        by_begin: dict[int, tuple[int, str]] = {}
        for container, values in ReachableObjects(self._roots).entries:
            for key, value in values.items():
                for begin, end in _storages([value]):
                    by_begin.setdefault(begin, (end, container.name(key)))
        return sorted(by_begin), by_begin

    @cached_property
    def _found(self) -> list[Any]:
        """The tensors and the recorded operations of the process."""
        return find_objects(lambda kind: issubclass(kind, (torch.Tensor, RecordedOp)))

    @cached_property
    def _ranges(self) -> _Ranges:
        return _storage_ranges(self._found)

    @cached_property
    def _unrecorded(self) -> _Ranges:
        return _storage_ranges(self._unrecorded_tensors)

    @cached_property
    def _unrecorded_tensors(self) -> list[torch.Tensor]:
        objects = self._found
        without = {id(tensor) for tensor in self._ignored} | {
            id(tensor)
            for op in objects
            if isinstance(op, RecordedOp)
            for tensor in tensors_in((op.args, op.kwargs, op.results))
        }
        return [
            value for value in objects if type(value) is not RecordedOp and id(value) not in without
        ]


_T = TypeVar("_T")
_Storages = tuple[Sequence[int], Mapping[int, tuple[int, _T]]]
"""Beginnings of storages, ascending, and for each its end and what belongs to it."""
_Ranges = tuple[list[int], list[int]]
"""Sorted beginnings of storages, and for each the largest end among it and those before it."""


def _at(storages: _Storages[_T], address: int, default: _T) -> _T:
    """Return what belongs to the storage that an address is in."""
    begins, by_begin = storages
    index = bisect_right(begins, address) - 1
    if index < 0:
        return default
    end, value = by_begin[begins[index]]
    return value if address < end else default


def _storage_ranges(objects: Iterable[object]) -> _Ranges:
    ranges = sorted(_storages(objects))
    return [begin for begin, _ in ranges], list(accumulate((end for _, end in ranges), max))


def _is_in(ranges: _Ranges, address: int) -> bool:
    begins, ends = ranges
    index = bisect_right(begins, address) - 1
    return index >= 0 and address < ends[index]


def _storages(objects: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Yield beginning and end of the storage of each tensor that has one."""
    for value in objects:
        if not issubclass(type(value), torch.Tensor):
            continue
        try:
            storage = value.untyped_storage()  # type: ignore[attr-defined]
            if storage.device.type == "meta":  # torch warns about addresses of fake tensors
                continue
            begin = storage.data_ptr()
        except RuntimeError:  # a sparse tensor has no storage, and that of a wrapper no memory
            continue
        if begin:
            yield begin, begin + storage.nbytes()
