"""Names for the memory that the graphs of a runner point to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphkit.buffers import InputBuffers
from graphkit.graphs import named_tensors
from graphkit.records import BufferRecord


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
        attention: Attention backend. Its tensors are named by attribute, unless ``state`` names
            them.
        weights: The model, or its weights by name.
    """
    held = {f"attention.{name}": tensor for name, tensor in _held(attention, 3)}
    known = {tensor.data_ptr() for tensor in held.values()}
    pool_tensors = getattr(getattr(attention, "kv_pool", None), "tensors", None)
    if callable(pool_tensors):  # a ``KVPool`` may keep them anywhere
        pooled = {f"attention.kv_pool.{name}": one for name, one in pool_tensors().items()}
        held |= {name: one for name, one in pooled.items() if one.data_ptr() not in known}
    declared = {tensor.data_ptr() for tensor in state.values()}
    own = {name: tensor for name, tensor in held.items() if tensor.data_ptr() not in declared}
    return {
        "weight": named_tensors(weights),
        "state": {**own, **state},
        "input": dict(buffers.arena.tensors),
        "mailbox": buffers.refresh_tensors(),
    }


def _held(thing: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among an object's attributes, and their attributes, by dotted name."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            tensors = ((i, item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))
            yield from ((f"{name}.{i}", tensor) for i, tensor in tensors)
        elif depth > 1 and not isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in _held(value, depth - 1))
