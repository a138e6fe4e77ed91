"""Paged KV pools, and the allocation of their slots to requests."""

from graphkit.kv.dsa import DSATokenToKVPool
from graphkit.kv.mha import MHATokenToKVPool
from graphkit.kv.mla import MLATokenToKVPool
from graphkit.kv.pool import TokenToKVPool
from graphkit.kv.requests import ReqToTokenPool
from graphkit.kv.slots import TokenSlotAllocator

__all__ = [
    "DSATokenToKVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "ReqToTokenPool",
    "TokenSlotAllocator",
    "TokenToKVPool",
]
