from graphkit.graphs.walk.inspect import (
    inspect_graph as inspect_graph,
)
from graphkit.graphs.walk.memory_map import MemoryMap as MemoryMap, NamedTensors as NamedTensors
