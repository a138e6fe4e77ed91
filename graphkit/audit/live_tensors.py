"""Find out whether memory belongs to a tensor of this process.

Libraries such as cuBLAS keep a workspace for each stream in memory of torch's allocator. No tensor
refers to it, so a target cannot declare it; it lives as long as the process.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate

import torch
from torch.utils._pytree import tree_leaves

from graphkit.graphs.recorder import RecordedOp


class LiveTensors:
    """Storages of all tensors of this process, as of the first query.

    The scan takes about 50 ms in a large process, so it waits for the first query.
    """

    def contain(self, address: int) -> bool:
        """Return whether an address is in the storage of a tensor.

        Also true if the tensors are unknown: ``gc.freeze`` hides objects from the collector.
        """
        return self._ranges is None or _is_in(self._ranges, address)

    def contain_unrecorded(self, address: int) -> bool:
        """Return the same without tensors that only the recorder's graphs refer to."""
        return self._ranges is None or _is_in(self._unrecorded, address)

    @cached_property
    def _ranges(self) -> _Ranges | None:
        objects = gc.get_objects()
        # The collector always lists torch.Tensor, unless gc.freeze hides it and tensors with it.
        if not any(each is torch.Tensor for each in objects):
            return None
        return _ranges_of(objects)

    @cached_property
    def _unrecorded(self) -> _Ranges:
        objects = gc.get_objects()
        recorded = {
            id(leaf)
            for op in objects
            if type(op) is RecordedOp
            for leaf in tree_leaves((op.args, op.kwargs, op.results))
        }
        return _ranges_of(each for each in objects if id(each) not in recorded)


_Ranges = tuple[list[int], list[int]]
"""Sorted beginnings of storages, and for each the largest end among it and those before it."""


def _ranges_of(objects: Iterable[object]) -> _Ranges:
    ranges = sorted(_storages(objects))
    return [begin for begin, _ in ranges], list(accumulate((end for _, end in ranges), max))


def _is_in(ranges: _Ranges, address: int) -> bool:
    begins, ends = ranges
    index = bisect_right(begins, address) - 1
    return index >= 0 and address < ends[index]


def _storages(objects: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Yield beginning and end of the storage of each tensor that has one."""
    for each in objects:
        if not issubclass(type(each), torch.Tensor):
            continue
        try:
            storage = each.untyped_storage()  # type: ignore[attr-defined]
            begin = storage.data_ptr()
        except RuntimeError:  # sparse and fake tensors have no storage
            continue
        if begin:
            yield begin, begin + storage.nbytes()
