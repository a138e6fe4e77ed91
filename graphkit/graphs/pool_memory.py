"""Memory of graph pools: its blocks, and what the operations of a capture allocated in it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from graphkit.graphs.operations import OpOverload, schema

_aten = torch.ops.aten
UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""Operations that allocate and write nothing: a CUDA graph has no node for them."""


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A block of the memory pool of graphs.

    Attributes:
        data: Its bytes, uint8 [n]. On CUDA they do not own the memory.
        is_live: Whether it holds a tensor that is not freed. Other blocks are scratch memory, which
            tensors of several captures used one after the other.
    """

    data: torch.Tensor
    is_live: bool

    @property
    def begin(self) -> int:
        """Address of the first byte."""
        return self.data.data_ptr()

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.data.data_ptr() + len(self.data)


def memory_segments(pool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the segments of torch's memory, or of a pool, as in ``memory_snapshot``."""
    # torch 2.11 to 2.13 drops references to these objects that it does not own. CPython then frees
    # numbers above 256 that the caller keeps (https://github.com/pytorch/pytorch/pull/196366).
    for number in (*(pool_id or (0, 0)), False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool_id, include_traces=False)
    return segments


class Allocation(NamedTuple):
    """Memory that an operation allocated during a capture. It may be free and used again since.

    Attributes:
        begin, end: Address of its first byte, and the one after its last byte.
        dtype: Dtype of the tensor in it.
        op: The operation, such as ``aten::empty.memory_format``.
        source: The user's line, as in ``NodeOrigin``.
        is_initialised: False if the operation wrote nothing.
        node: Number of nodes that the graph had before the operation.
    """

    begin: int
    end: int
    dtype: torch.dtype
    op: str
    source: str
    is_initialised: bool
    node: int = 0


def new_allocations(
    func: OpOverload, out: Any, source: Callable[[bool], str], node: int
) -> Iterator[Allocation]:
    """Yield the memory of the results that an operation allocated after so many nodes.

    ``source`` returns the user's line; it takes whether the operation wrote its results.
    """
    facts = _op_facts(func)
    results = out if facts.num_results > 1 and isinstance(out, (tuple, list)) else (out,)
    for index in facts.fresh:
        result = results[index]
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                begin = storage.data_ptr()
                yield Allocation(
                    begin,
                    begin + storage.nbytes(),
                    tensor.dtype,
                    facts.name,
                    source(facts.is_initialised),
                    facts.is_initialised,
                    node,
                )


class _OperationFacts(NamedTuple):
    """What the schema says of an operation; asking for it takes longer than the rest.

    ``fresh`` are the indices of the results that alias no argument.
    """

    name: str
    num_results: int
    fresh: tuple[int, ...]
    is_initialised: bool


@cache
def _op_facts(func: OpOverload) -> _OperationFacts:
    returns = schema(func).returns
    fresh = tuple(i for i, result in enumerate(returns) if result.alias_info is None)
    is_initialised = func.overloadpacket not in UNINITIALISED
    return _OperationFacts(func.name(), len(returns), fresh, is_initialised)


def blocks_of_segments(
    segments: Sequence[Mapping[str, Any]], device: torch.device
) -> list[PoolBlock]:
    """Return the blocks of segments of ``torch.cuda.memory_snapshot``."""
    return [
        PoolBlock(
            device_bytes(block["address"], block["size"], device),
            is_live=block["state"] == "active_allocated",
        )
        for segment in segments
        for block in segment["blocks"]
    ]


class _DeviceMemory:
    """Device memory as ``torch.as_tensor`` reads it (``__cuda_array_interface__``, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return CUDA memory as a tensor that does not own it, uint8 [size]."""
    return torch.as_tensor(_DeviceMemory(address, size), device=device)


def non_owning_aliases(tree: Any) -> Any:
    """Replace every CUDA tensor of a pytree by an alias that does not own its memory.

    The outputs of a captured size are valid until the next replay of any graph of the pool. Because
    nothing owns their memory, the allocator reuses it for the next, smaller size, which keeps the
    pool near the size of the largest graph.
    """
    return tree_map(_alias, tree)


def _alias(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda or not leaf.numel():
        return leaf
    storage = leaf.untyped_storage()
    memory = device_bytes(storage.data_ptr(), storage.nbytes(), leaf.device)
    return memory.view(leaf.dtype).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
