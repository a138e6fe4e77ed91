"""Tensors that a function writes although it did not create them, such as a KV pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.graphs.capture_state import compilation_disabled
from graphkit.graphs.operations import OpOverload, arguments_written, storage_id, tensors_in
from graphkit.records import tensor_text
from graphkit.runners.known_memory import attribute_tensors
from graphkit.runners.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots

_POOL_DEPTH = 2
"""Attributes down to the tensors of an object of graphkit, such as a KV pool."""


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
    def watching(self, arguments: Any) -> Iterator[None]:
        """Save what operations write in a block; tensors in ``arguments`` do not count."""
        own = {storage_id(tensor) for tensor in tensors_in(arguments)}
        with compilation_disabled(), _WriteMode(self, own):
            yield

    def save(self, tensor: torch.Tensor) -> None:
        """Save the storage of a tensor, if it is not saved yet."""
        if tensor.layout is torch.strided and storage_id(tensor) not in self.memory:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(tensor.untyped_storage())
            try:
                saved = flat.clone()
            except torch.OutOfMemoryError:  # a pool may fill the device
                saved = flat.cpu()
            self.memory[storage_id(tensor)], self._saved[storage_id(tensor)] = flat, saved

    def restore(self) -> None:
        """Restore the contents."""
        for key, flat in self.memory.items():
            flat.copy_(self._saved[key])

    def contents(self) -> dict[int, torch.Tensor]:
        """Return copies of the contents, where those of the start are."""
        return {
            key: flat.to(self._saved[key].device, copy=True) for key, flat in self.memory.items()
        }

    def place(self, key: int, element: int) -> str:
        """Return the name of an element of a storage: a tensor's path and its first indices."""
        flat = self.memory[key]
        for name, tensor in self._named():
            if tensor.layout is not torch.strided or storage_id(tensor) != key:
                continue
            offset = element - tensor.storage_offset()
            if tensor.dtype == flat.dtype and tensor.is_contiguous() and offset < tensor.numel():
                index = [int(i) for i in torch.unravel_index(torch.tensor(offset), tensor.shape)]
                return f"`{name}` at {index[: max(1, tensor.ndim - 2)]}"
            return f"`{name}`"
        return f"a tensor of {tensor_text(flat.dtype, flat.shape)}"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._declared.items()
        for container, values in ReachableObjects(walk_roots(self._fn), SEARCH_DEPTH).entries:
            for key, value in values.items():
                name = container.name(key)
                if isinstance(value, torch.Tensor):
                    yield name, value
                elif type(value).__module__.partition(".")[0] == "graphkit":
                    for inner, tensor in attribute_tensors(value, _POOL_DEPTH):
                        yield f"{name}.{inner}", tensor


class _WriteMode(TorchDispatchMode):
    """Saves tensors before their first write; ``own`` has the storages that do not count."""

    def __init__(self, written: WrittenTensors, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written, self._own = written, own

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in arguments_written(func, args, kwargs):
            if _has_storage(tensor) and storage_id(tensor) not in self._own:
                self._written.save(tensor)
        result = func(*args, **kwargs)
        given = {
            storage_id(tensor) for tensor in tensors_in([args, kwargs]) if _has_storage(tensor)
        }
        made = {storage_id(tensor) for tensor in tensors_in([result]) if _has_storage(tensor)}
        self._own |= made - given
        return result


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
