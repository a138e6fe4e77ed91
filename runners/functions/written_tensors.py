"""Tensors that a function writes although it did not create them, such as a KV pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphkit.graphs.capture_state import compilation_disabled
from graphkit.graphs.operations import WriteMode, has_storage, storage_id
from graphkit.records import tensor_text
from graphkit.runners.capture_checks import host_objects


class WrittenTensors:
    """Memory that runs of a function wrote, outside of what they created, with earlier contents.

    Args:
        fn: The function.
        declared: Tensors that it is known to write, by name.

    Attributes:
        memory: All elements of each tensor's storage, [N], by storage.
    """

    def __init__(self, fn: Any, declared: Mapping[str, torch.Tensor]) -> None:
        self._fn, self._declared = fn, declared
        self.memory: dict[int, torch.Tensor] = {}
        self._saved: dict[int, torch.Tensor] = {}
        for tensor in declared.values():
            self.save(tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Save what operations of a block write, if it is older than the block."""
        with compilation_disabled(), WriteMode(self.save):
            yield

    def save(self, tensor: torch.Tensor) -> None:
        """Save the storage of a tensor, if it is not saved yet."""
        if has_storage(tensor) and storage_id(tensor) not in self.memory:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(tensor.untyped_storage())
            try:
                saved = flat.clone()
            except torch.OutOfMemoryError:  # a pool may fill the device
                saved = flat.cpu()
            self.memory[storage_id(tensor)], self._saved[storage_id(tensor)] = flat, saved

    def restore(self) -> None:
        """Restore the contents."""
        for key, saved in self._saved.items():
            self.memory[key].copy_(saved)

    def release(self) -> None:
        """Forget the contents of declared tensors, which others restore from now on."""
        for tensor in self._declared.values():
            self._saved.pop(storage_id(tensor), None)

    def fill(self, numbers: Mapping[int, float]) -> None:
        """Restore the contents, and fill some storages with a number each."""
        self.restore()
        for key, number in numbers.items():
            self.memory[key].copy_(torch.tensor(number))  # fill_ lacks dtypes of eight bits

    def changes(self, numbers: Mapping[int, float]) -> dict[int, torch.Tensor]:
        """Return the indices of the elements that differ from those of ``fill``, by storage."""
        changes = {}
        for key, flat in self.memory.items():
            start = self._saved[key].to(flat.device)
            if key in numbers:
                start = torch.tensor(numbers[key]).to(flat.device, flat.dtype).expand(1)
            changes[key] = (_bits(flat) != _bits(start)).nonzero().flatten()
        return changes

    def undeclared(self) -> list[str]:
        """Return the names of written tensors that are not declared."""
        declared = {storage_id(tensor) for tensor in self._declared.values()}
        others = [key for key in self.memory if key not in declared]
        return [self.place(key, 0).partition(" at ")[0] for key in others]

    def place(self, key: int, element: int) -> str:
        """Return the name of an element of a storage: a tensor's path and its first indices."""
        flat = self.memory[key]
        for name, tensor in self._named():
            if not has_storage(tensor) or storage_id(tensor) != key:
                continue
            offset = element - tensor.storage_offset()
            if tensor.dtype == flat.dtype and tensor.is_contiguous() and offset < tensor.numel():
                index = [int(i) for i in torch.unravel_index(torch.tensor(offset), tensor.shape)]
                return f"`{name}` at {index[: max(1, tensor.ndim - 2)]}"
            return f"`{name}`"
        return f"a tensor of {tensor_text(flat.dtype, flat.shape)}"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._declared.items()
        yield from host_objects(self._fn).named_tensors()


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return elements as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return flat.view(kinds.get(flat.itemsize, torch.int64))
