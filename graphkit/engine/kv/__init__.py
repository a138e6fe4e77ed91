"""Paged KV pools, recurrent states, and the allocation of KV slots to requests."""

from graphkit.engine.kv.contracts import KVPool, RequestPool, RequestTable
from graphkit.engine.kv.mha import MHATokenToKVPool
from graphkit.engine.kv.mla import DSATokenToKVPool, IndexKeyPool, MLATokenToKVPool
from graphkit.engine.kv.pool import TokenToKVPool
from graphkit.engine.kv.recurrent import RecurrentStatePool
from graphkit.engine.kv.recurrent_rows import RecurrentInputs, ScanRows, StateSlots
from graphkit.engine.kv.scanned import ScannedStates, ScanShape
from graphkit.engine.kv.slots import ReqToTokenPool, TokenSlotAllocator

__all__ = [
    "DSATokenToKVPool",
    "IndexKeyPool",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "RecurrentInputs",
    "RecurrentStatePool",
    "ReqToTokenPool",
    "RequestPool",
    "RequestTable",
    "ScanRows",
    "ScanShape",
    "ScannedStates",
    "StateSlots",
    "TokenSlotAllocator",
    "TokenToKVPool",
]
