from graphkit.graphs.attribution import (
    Attribution as Attribution,
    NodeOrigin as NodeOrigin,
    Stage as Stage,
    scope as scope,
)
from graphkit.graphs.backend import (
    Backend as Backend,
    CapturedGraph as CapturedGraph,
    LoopGraph as LoopGraph,
)
from graphkit.graphs.capture_failure import CaptureFailure as CaptureFailure
from graphkit.graphs.capture_state import is_capturing as is_capturing, is_recording as is_recording
from graphkit.graphs.cuda import CudaBackend as CudaBackend, gc_paused as gc_paused
from graphkit.graphs.cuda_graph import CudaGraph as CudaGraph, CudaPool as CudaPool
from graphkit.graphs.devices import (
    backend_for as backend_for,
    environment as environment,
    resolve_device as resolve_device,
)
from graphkit.graphs.host_memory import UNSET_MARKER as UNSET_MARKER
from graphkit.graphs.pool_memory import Allocation as Allocation, PoolBlock as PoolBlock
from graphkit.graphs.recorded_graph import RecordedGraph as RecordedGraph
from graphkit.graphs.recorder import RecorderBackend as RecorderBackend
from graphkit.graphs.size_table import (
    SizeTable as SizeTable,
    default_batch_sizes as default_batch_sizes,
)
from graphkit.graphs.snapshot import StateSnapshot as StateSnapshot
from graphkit.graphs.source_lines import caller_line as caller_line, named_tensors as named_tensors
from graphkit.graphs.walk import (
    NamedTensors as NamedTensors,
    inspect_graph as inspect_graph,
)
