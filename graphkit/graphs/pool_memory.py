"""Memory of graph pools: its blocks, and what the operations of a capture allocated in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that an operation allocated during a capture. It may be free and used again since.

    Attributes:
        begin, end: Address of its first byte, and the one after its last byte.
        dtype: Dtype of the tensor in it.
        op: The operation, such as ``aten::empty.memory_format``.
        source: The user's line, as in ``NodeOrigin``.
        is_initialised: False if the operation wrote nothing.
    """

    begin: int
    end: int
    dtype: torch.dtype
    op: str
    source: str
    is_initialised: bool


def allocated_tensors(func: torch._ops.OpOverload, out: Any) -> Iterator[torch.Tensor]:
    """Yield the results of an operation whose memory it allocated, by its schema."""
    returns = func._schema.returns
    results = out if isinstance(out, (tuple, list)) and len(returns) > 1 else (out,)
    for declared, result in zip(returns, results, strict=False):
        if declared.alias_info is None:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                    yield tensor


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
