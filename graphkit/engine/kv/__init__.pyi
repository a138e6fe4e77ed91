from graphkit.engine.kv.contracts import (
    KVPool as KVPool,
    RequestPool as RequestPool,
    RequestTable as RequestTable,
)
from graphkit.engine.kv.mha import MHATokenToKVPool as MHATokenToKVPool
from graphkit.engine.kv.mla import (
    DSATokenToKVPool as DSATokenToKVPool,
    IndexKeyPool as IndexKeyPool,
    MLATokenToKVPool as MLATokenToKVPool,
)
from graphkit.engine.kv.pool import TokenToKVPool as TokenToKVPool
from graphkit.engine.kv.recurrent import RecurrentStatePool as RecurrentStatePool
from graphkit.engine.kv.recurrent_rows import (
    RecurrentInputs as RecurrentInputs,
    ScanRows as ScanRows,
    StateSlots as StateSlots,
)
from graphkit.engine.kv.scanned import (
    ScannedStates as ScannedStates,
    ScanShape as ScanShape,
)
from graphkit.engine.kv.slots import (
    ReqToTokenPool as ReqToTokenPool,
    TokenSlotAllocator as TokenSlotAllocator,
)
