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


class TensorsAlive:
    """The memory of every tensor of this process, as of the first question about it.

    Looking takes some 50 ms in a large process, so it is put off until somebody asks.
    """

    def hold(self, address: int) -> bool:
        """Whether a tensor's memory is there.

        True too for what is unknown: the collector does not show what ``gc.freeze`` took from it.
        """
        if self._ranges is None:
            return True
        begins, ends = self._ranges
        at = bisect_right(begins, address) - 1
        return at >= 0 and address < ends[at]

    @cached_property
    def _ranges(self) -> tuple[list[int], list[int]] | None:
        """Where storages begin, and how far those that begin until there go at most."""
        objects = gc.get_objects()
        if not any(each is torch.Tensor for each in objects):
            return None  # it is hidden, and so tensors may be; some of Python's own always are
        ranges = sorted(_storages(objects))
        return [begin for begin, _ in ranges], list(accumulate((end for _, end in ranges), max))


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
