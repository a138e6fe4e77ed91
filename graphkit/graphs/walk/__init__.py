"""Contents of captured graphs: nodes, arguments, origins and times."""

from graphkit.graphs.walk.inspect import inspect_graph, named_tensors
from graphkit.graphs.walk.memory_map import MemoryMap, NamedTensors

__all__ = ["MemoryMap", "NamedTensors", "inspect_graph", "named_tensors"]
