"""Names for the memory that the graphs of a runner point to, and the attributes of objects.

A lazy proxy may load or raise whatever is asked of it. Types are therefore compared by ``is_a``,
attributes are read by ``own_attributes``, and lists by the methods of their built-in type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from torch import nn

from graphkit.buffers import InputBuffers
from graphkit.buffers.attention import kv_pools
from graphkit.graphs import named_tensors
from graphkit.records import BufferRecord

_MRO, _CLASS_DICT, _NAME = (
    vars(type)[name].__get__ for name in ("__mro__", "__dict__", "__name__")
)
"""Read an attribute of a class past its metaclass."""


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is of some types, without reading its ``__class__``."""
    return issubclass(type(value), kinds)


def bases(cls: type) -> tuple[type, ...]:
    """Return a class and its bases, in the order in which attributes are looked up."""
    return _MRO(cls)  # type: ignore[no-any-return]


def class_attributes(cls: type) -> MappingProxyType[str, Any]:
    """Return the attributes that a class itself defines."""
    return _CLASS_DICT(cls)  # type: ignore[no-any-return]


def type_name(cls: type) -> str:
    """Return the name of a class."""
    return _NAME(cls)  # type: ignore[no-any-return]


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the dict of an object's attributes; empty if it has none."""
    for base in bases(type(value)):
        slot: Any = class_attributes(base).get("__dict__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
            attributes = slot.__get__(value)
            return attributes if type(attributes) is dict else {}
    return {}


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple or a deque; ``None`` for other objects."""
    for kind in (list, tuple, deque):
        if is_a(value, kind):
            return list(kind.__iter__(value))
    return None


_TABLES = "req_to_token_pool", "window_req_to_token_pool"
_ATTENTION_DEPTH = 3
"""Attributes down to a backend's tensors: its cache, a pool of that, and the pool's tensors."""


def buffer_records(buffers: InputBuffers) -> Iterator[BufferRecord]:
    """Yield a record of each field of a runner's inputs."""
    for layout in buffers.layouts:
        tensor = buffers.arena.tensors[layout.name]
        yield BufferRecord(
            field=layout.name,
            dtype=str(layout.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            axis=layout.field.axis.value,
            pad=float(layout.pad),
            address=tensor.data_ptr(),
            size=tensor.numel() * tensor.element_size(),
            is_bound=layout.name in buffers.bound_fields,
            meaning=layout.field.meaning,
        )


def memory_names(
    buffers: InputBuffers,
    state: Mapping[str, torch.Tensor],
    attention: Any,
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that a runner can name, by kind of memory and by name.

    Args:
        buffers: The runner's buffers.
        state: Mutable state by name.
        attention: Attention backend. Its tensors are named by attribute, except for those that
            ``state`` names.
        weights: The model, or its weights by name.
    """
    attributes = attribute_tensors(attention, _ATTENTION_DEPTH)
    held = {f"attention.{name}": tensor for name, tensor in attributes}
    known = {tensor.data_ptr() for tensor in held.values()}
    held |= {
        f"attention.kv_pool.{name}": tensor
        for name, tensor in _pool_tensors(getattr(attention, "kv_pool", None)).items()
        if tensor.data_ptr() not in known
    }
    declared = {tensor.data_ptr() for tensor in state.values()}
    undeclared = {
        name: tensor for name, tensor in held.items() if tensor.data_ptr() not in declared
    }
    return {
        "weight": named_tensors(weights),
        "state": {**undeclared, **state},
        "input": dict(buffers.arena.tensors),
        "mailbox": buffers.refresh_tensors(),
    }


def memory_parts(
    buffers: InputBuffers, state: Mapping[str, torch.Tensor], attention: Any
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of a runner by the attribute of ``MemoryEstimate`` that counts them.

    Arguments are those of ``memory_names``. Bound fields belong to another graph.
    """
    inputs = buffers.arena.tensors
    pools = (getattr(attention, name, None) for name in _TABLES)
    tables = [pool.req_to_token for pool in pools if pool is not None]
    held = (tensor for _, tensor in attribute_tensors(attention, _ATTENTION_DEPTH))
    return {
        "kv": [tensor for pool in kv_pools(attention) for tensor in _pool_tensors(pool).values()],
        "recurrent_state": [*state.values()],
        "static_buffers": [
            *(tensor for name, tensor in inputs.items() if name not in buffers.bound_fields),
            *buffers.refresh_tensors().values(),
            *tables,
        ],
        "workspace": [tensor for tensor in held if not any(tensor is table for table in tables)],
    }


def _pool_tensors(pool: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a ``KVPool``, which may keep them anywhere, such as in a dict."""
    tensors: Mapping[str, torch.Tensor] = getattr(pool, "tensors", dict)()
    return tensors


def attribute_tensors(owner: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield dotted name and tensor of an object's attributes, ``depth`` attributes deep at most."""
    for name, value in own_attributes(owner).items():
        items = items_of(value)
        if is_a(value, torch.Tensor):
            yield name, value
        elif items is not None:
            for i, item in enumerate(items):
                if is_a(item, torch.Tensor):
                    yield f"{name}.{i}", item
        elif depth > 1 and not is_a(value, nn.Module):
            for inner, tensor in attribute_tensors(value, depth - 1):
                yield f"{name}.{inner}", tensor
