"""Find the tensor of this process that an address belongs to, and where it is held.

Libraries such as cuBLAS keep a workspace for each stream in memory of torch's allocator. No tensor
refers to it, so a target cannot declare it; it lives as long as the process.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.graphs.operations import tensors_in
from graphkit.graphs.recorded_graph import RecordedOp
from graphkit.graphs.tracked_objects import find_objects, find_referrers
from graphkit.records import tensor_text
from graphkit.runners.known_memory import is_a, own_attributes, type_name

_T = TypeVar("_T")


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
        return address in self._all

    def contain_unrecorded(self, address: int) -> bool:
        """Return the same without tensors that only the recorder's graphs refer to."""
        return address in self._unrecorded

    def names(self, addresses: Sequence[int]) -> list[str]:
        """Return where the tensor of each address is held, or its dtype and shape.

        A name is an attribute path, a closure variable or a module global, such as
        ``Model.layers.0.weight``, ``forward.mask`` or ``engine.TABLE``. It is empty if no tensor
        holds the address.
        """
        names = {address: next(iter(self._reached.at(address)), "") for address in addresses}
        tensors = {
            address: views[0]
            for address, name in names.items()
            if not name and (views := self.tensors_at(address))
        }
        held = attribute_holders(list(tensors.values()))
        for address, tensor in tensors.items():
            holders = held.get(id(tensor))
            names[address] = holders[0].name if holders else shape_text(tensor)
        return [names[address] for address in addresses]

    def storages(self) -> list[tuple[int, int]]:
        """Return beginning and end of the storage of each tensor, ascending."""
        return sorted(set(_storages(self._unrecorded_tensors)))

    def tensors_at(self, address: int) -> Sequence[torch.Tensor]:
        """Return the tensors on the storage that holds an address; empty if none does."""
        return self._unrecorded.at(address)

    @cached_property
    def _reached(self) -> _Storages[str]:
        """The paths by which forwards reach storages."""
        return _Storages(
            (value, container.name(key))
            for container, values in ReachableObjects(self._roots).entries
            for key, value in values.items()
        )

    @cached_property
    def _found(self) -> list[Any]:
        """The tensors and the recorded operations of the process."""
        return find_objects(lambda kind: issubclass(kind, (torch.Tensor, RecordedOp)))

    @cached_property
    def _all(self) -> _Storages[Any]:
        return _Storages((value, value) for value in self._found)

    @cached_property
    def _unrecorded(self) -> _Storages[torch.Tensor]:
        return _Storages((tensor, tensor) for tensor in self._unrecorded_tensors)

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


class _Storages(Generic[_T]):
    """What belongs to the storages of tensors, found by an address in them.

    Args:
        held: Values, of which those that are tensors with memory count, and what belongs to each.
    """

    def __init__(self, held: Iterable[tuple[object, _T]]) -> None:
        self._held: dict[int, tuple[int, list[_T]]] = {}
        for value, what in held:
            for begin, end in _storages([value]):
                other_end, those = self._held.setdefault(begin, (end, []))
                those.append(what)
                self._held[begin] = max(end, other_end), those
        self._begins = sorted(self._held)
        self._ends = list(accumulate((self._held[begin][0] for begin in self._begins), max))
        """The largest end among a storage and those before it."""

    def __contains__(self, address: int) -> bool:
        index = bisect_right(self._begins, address) - 1
        return index >= 0 and address < self._ends[index]

    def at(self, address: int) -> Sequence[_T]:
        """Return what belongs to the storage that an address is in, as it was found."""
        index = bisect_right(self._begins, address) - 1
        end, those = self._held[self._begins[index]] if index >= 0 else (0, [])
        return those if address < end else ()


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


@dataclass(frozen=True, slots=True)
class Holder:
    """An attribute, a parameter or a module global that held a tensor, directly or in a dict.

    Attributes:
        key: Name of the attribute.
        name: Name for people, such as ``Engine.static_ids`` or ``Engine.static['ids']``.
        shape: Dtype and shape of the tensor.
        entry: Key in the dict; empty if the attribute was the tensor.
    """

    owner: weakref.ReferenceType[Any]
    key: str
    name: str
    shape: str
    entry: tuple[str | int, ...] = ()

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor that it holds now; ``None`` without one."""
        owner = self.owner()
        for values in _attributes(owner):
            value = values.get(self.key)
            for entry in self.entry:
                value = value.get(entry) if isinstance(value, dict) else None
            if isinstance(value, torch.Tensor):
                return value
        return None


def weight_holders(begins: set[int]) -> dict[int, list[Holder]]:
    """Return the modules that hold storages as parameters or buffers, by address."""
    modules = find_objects(lambda kind: issubclass(kind, nn.Module))
    inner = {id(child) for module in modules for child in module._modules.values()}
    holders: dict[int, list[Holder]] = {}
    for root in (module for module in modules if id(module) not in inner):
        for path, module in root.named_modules():
            prefix = ".".join(filter(None, (type(root).__name__, path)))
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
                    continue
                begin = tensor.untyped_storage().data_ptr()
                if begin in begins:
                    holder = Holder(weakref.ref(module), key, f"{prefix}.{key}", shape_text(tensor))
                    holders.setdefault(begin, []).append(holder)
    return holders


def attribute_holders(tensors: list[torch.Tensor]) -> dict[int, list[Holder]]:
    """Return the attributes and module globals that hold tensors, by the tensor's id."""
    if not tensors:
        return {}
    wanted = {id(tensor) for tensor in tensors}
    # Without lists: those of this function would refer to each other and keep the tensors.
    referrers = [
        referrer for referrer in find_referrers(tensors) if type(referrer) not in (list, tuple)
    ]
    owners = [referrer for referrer in referrers if type(referrer) is not dict]
    # A dict has the attributes of an object, or is itself an attribute.
    dicts = [referrer for referrer in referrers if type(referrer) is dict]
    known = set(map(id, dicts))
    for _ in range(2):
        outer = find_referrers(dicts) if dicts else []
        owners += [referrer for referrer in outer if type(referrer) not in (list, tuple, dict)]
        dicts = [referrer for referrer in outer if type(referrer) is dict]
        del outer
    del referrers, dicts
    holders: dict[int, list[Holder]] = {}
    for owner in {id(owner): owner for owner in owners}.values():
        attributes = own_attributes(owner)
        if not attributes:
            continue
        try:
            reference = weakref.ref(owner)
        except TypeError:
            continue
        name = str(attributes.get("__name__"))
        if not is_a(owner, ModuleType):
            name = type_name(type(owner))
        for key, value in list(attributes.items()):
            if id(value) in wanted:
                holder = Holder(reference, key, f"{name}.{key}", shape_text(value))
                holders.setdefault(id(value), []).append(holder)
            elif id(value) in known:
                for entry, held in list(value.items()):
                    if id(held) in wanted and isinstance(entry, (str, int)):
                        path = f"{name}.{key}[{entry!r}]"
                        holder = Holder(reference, key, path, shape_text(held), (entry,))
                        holders.setdefault(id(held), []).append(holder)
    return holders


def _attributes(owner: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the attributes of an object by name, and the parameters and buffers of a module."""
    yield own_attributes(owner)
    if is_a(owner, nn.Module):
        yield owner._parameters
        yield owner._buffers


def shape_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor as text."""
    return tensor_text(tensor.dtype, tensor.shape)
