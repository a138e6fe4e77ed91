"""Names for the memory that the graphs of a runner point to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphkit.buffers import InputBuffers
from graphkit.graphs import named_tensors
from graphkit.records import BufferRecord

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
    attributes = _attribute_tensors(attention, _ATTENTION_DEPTH)
    held = {f"attention.{name}": tensor for name, tensor in attributes}
    known = {tensor.data_ptr() for tensor in held.values()}
    pool_tensors = getattr(getattr(attention, "kv_pool", None), "tensors", None)
    if callable(pool_tensors):  # a ``KVPool`` may keep them anywhere, such as in a dict
        held |= {
            f"attention.kv_pool.{name}": tensor
            for name, tensor in pool_tensors().items()
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


def _attribute_tensors(owner: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield dotted name and tensor of an object's attributes, ``depth`` attributes deep at most."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}.{i}", item
        elif depth > 1 and not isinstance(value, nn.Module):
            for inner, tensor in _attribute_tensors(value, depth - 1):
                yield f"{name}.{inner}", tensor
