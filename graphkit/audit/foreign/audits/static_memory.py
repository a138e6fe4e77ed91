"""Memory outside of a graph's pool that its nodes point to: what it is, and whether it still is.

A graph keeps addresses. It reads freed memory once the tensor there is gone, even if the allocator
has handed the memory to another tensor, and old values once the program assigns a new tensor where
it held the old one. Both are visible without reading memory: through weak references to storages,
and through the attributes that held the tensors at the capture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphkit.audit.live_tensors import (
    Holder,
    LiveTensors,
    attribute_holders,
    shape_text,
    weight_holders,
)

_UNKNOWN = object()
"""In the place of a block, for an address that was not searched."""


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The storage of a tensor that a graph points to.

    Attributes:
        begin, end: Address of its first byte, and the one after its last byte.
        name: Path of the parameter, or the first holder's name; dtype and shape without either.
        shape: Dtype and shape of the tensor that the first holder held.
        is_weight: Whether a module held it as a parameter or buffer.
        storage: Tells whether the storage still exists.
        holders: Where it was held.
    """

    begin: int
    end: int
    name: str
    shape: str
    is_weight: bool
    storage: StorageWeakRef
    holders: tuple[Holder, ...]

    @property
    def is_freed(self) -> bool:
        """Whether the tensor is gone. Its memory may belong to another tensor by now."""
        return bool(self.storage.expired())

    def replaced_in(self) -> str:
        """Return the name of a holder that holds an equally shaped tensor elsewhere, or nothing."""
        for holder in self.holders:
            tensor = holder.tensor()
            if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
                continue
            begin = tensor.untyped_storage().data_ptr()
            if begin and begin != self.begin and shape_text(tensor) == holder.shape:
                return holder.name
        return ""


class StaticMemories:
    """The storages that the graphs of a process point to; each is looked up once.

    Addresses without a storage, such as workspaces of libraries, are known by their block of the
    allocator, so that only new memory takes a search of the process.
    """

    def __init__(self) -> None:
        self._known: dict[int, StaticMemory] = {}
        self._begins: list[int] = []
        self._without_storage: dict[int, Hashable] = {}

    def find(
        self,
        addresses: Iterable[int],
        live: LiveTensors,
        block_at: Callable[[int], Hashable] = lambda _address: None,
    ) -> Mapping[int, StaticMemory]:
        """Return the storage of each address that is in one.

        Takes three passes over the objects of the process if an address is in new memory, and
        otherwise none.
        """
        addresses = list(addresses)
        new: dict[int, Sequence[torch.Tensor]] = {}
        for address in addresses:
            if self._at(address) is not None:
                continue
            block = block_at(address)
            if self._without_storage.get(address, _UNKNOWN) == block:
                continue
            tensors = live.tensors_at(address)
            if tensors:
                self._without_storage.pop(address, None)
                new[tensors[0].untyped_storage().data_ptr()] = tensors
            else:
                self._without_storage[address] = block
        if new:
            # Memory of a storage that is gone may be in the middle of another one by now.
            known = {begin: memory for begin, memory in self._known.items() if not memory.is_freed}
            self._known = known | dict(_described(new))
            self._begins = sorted(self._known)
        memories = {address: self._at(address) for address in addresses}
        return {address: memory for address, memory in memories.items() if memory is not None}

    def _at(self, address: int) -> StaticMemory | None:
        """Return the storage at an address, if it is known and still exists."""
        index = bisect_right(self._begins, address) - 1
        memory = self._known[self._begins[index]] if index >= 0 else None
        if memory is None or address >= memory.end or memory.is_freed:
            return None
        return memory


def _described(tensors: Mapping[int, Sequence[torch.Tensor]]) -> Iterator[tuple[int, StaticMemory]]:
    """Yield storages by address.

    Args:
        tensors: The tensors on each storage. Any of them may be the one that the program holds: the
            base of a view, or the view.
    """
    weights = weight_holders(set(tensors))
    attributes = attribute_holders(
        [view for begin, views in tensors.items() if begin not in weights for view in views]
    )
    for begin, views in tensors.items():
        storage, is_weight = views[0].untyped_storage(), begin in weights
        held = weights[begin] if is_weight else []
        held = held or [holder for view in views for holder in attributes.get(id(view), ())]
        shape = held[0].shape if held else shape_text(views[0])
        name, end = held[0].name if held else shape, begin + storage.nbytes()
        reference = StorageWeakRef(storage)
        yield begin, StaticMemory(begin, end, name, shape, is_weight, reference, tuple(held))
