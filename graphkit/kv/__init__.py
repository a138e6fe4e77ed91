"""Paged KV pools: where keys and values live, and which slot belongs to whom."""

from graphkit.kv.mha import MHATokenToKVPool
from graphkit.kv.requests import ReqToTokenPool
from graphkit.kv.slots import TokenSlotAllocator

__all__ = ["MHATokenToKVPool", "ReqToTokenPool", "TokenSlotAllocator"]
