"""Whether a tensor holds some memory: what none holds is a library's own.

cuBLAS and its like keep a workspace for each stream, which torch allocates for them. Nobody could
declare it, and it lives as long as the process.
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


class TensorsAlive:
    """The memory of every tensor of this process, as of the first question about it.

    Looking takes some 50 ms in a large process, so it is put off until somebody asks.
    """

    def hold(self, address: int) -> bool:
        """Whether a tensor's memory is there.

        True too for what is unknown: the collector does not show what ``gc.freeze`` took from it.
        """
        return self._ranges is None or _is_in(self._ranges, address)

    def hold_beside_recordings(self, address: int) -> bool:
        """The same, but for the tensors of the recorder's graphs, which hold all that they use."""
        return self._ranges is None or _is_in(self._unrecorded, address)

    @cached_property
    def _ranges(self) -> _Ranges | None:
        objects = gc.get_objects()
        if not any(each is torch.Tensor for each in objects):
            return None  # it is hidden, and so tensors may be; some of Python's own always are
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
"""Where storages begin, and how far those that begin until there go at most."""


def _ranges_of(objects: Iterable[object]) -> _Ranges:
    ranges = sorted(_storages(objects))
    return [begin for begin, _ in ranges], list(accumulate((end for _, end in ranges), max))


def _is_in(ranges: _Ranges, address: int) -> bool:
    begins, ends = ranges
    at = bisect_right(begins, address) - 1
    return at >= 0 and address < ends[at]


def _storages(objects: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Beginning and end of the storage of every tensor that has one."""
    for each in objects:
        if not issubclass(type(each), torch.Tensor):
            continue
        try:
            storage = each.untyped_storage()  # type: ignore[attr-defined]
            begin = storage.data_ptr()
        except RuntimeError:  # a sparse or a fake tensor has none
            continue
        if begin:
            yield begin, begin + storage.nbytes()
