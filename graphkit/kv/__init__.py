"""Paged KV pools, recurrent states, and the allocation of KV slots to requests."""

from graphkit.kv.contracts import KVPool, RequestPool, RequestTable
from graphkit.kv.dsa import DSATokenToKVPool
from graphkit.kv.mha import MHATokenToKVPool
from graphkit.kv.mla import MLATokenToKVPool
from graphkit.kv.pool import TokenToKVPool
from graphkit.kv.recurrent import RecurrentInputs, RecurrentStatePool, StateSlots
from graphkit.kv.requests import ReqToTokenPool
from graphkit.kv.slots import TokenSlotAllocator

__all__ = [
    "DSATokenToKVPool",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "RecurrentInputs",
    "RecurrentStatePool",
    "ReqToTokenPool",
    "RequestPool",
    "RequestTable",
    "StateSlots",
    "TokenSlotAllocator",
    "TokenToKVPool",
]
