"""Find what holds tensors of this process: parameters, attributes, and dicts in attributes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from graphkit.graphs.tracked_objects import find_objects, find_referrers
from graphkit.records import tensor_text
from graphkit.runners.known_memory import is_a, own_attributes, type_name


@dataclass(frozen=True, slots=True)
class Holder:
    """An attribute, a parameter or a module global that held a tensor, directly or in a dict.

    Attributes:
        owner: The object.
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
