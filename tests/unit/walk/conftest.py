"""The reference target, and a fake CUDA driver with the graphs that a test describes.

Its calls return an error and values like cuda-bindings; the values are ``None`` after an error.
Parameters are in real memory, because the code under test reads them from there.
"""
# ruff: noqa: N802, N815 - names of the driver API

from __future__ import annotations

import ctypes
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from graphkit.models.reference import reference_target

_INVALID_VALUE = 1


class NodeType(Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13
    CU_GRAPH_NODE_TYPE_NEW_KIND = 99


class FakeDriver:
    """Kernels, graphs and nodes by handle; ``dot`` is the text of ``cuGraphDebugDotPrint``."""

    CUgraph = CUgraphNode = int
    CUgraphDebugDot_flags = SimpleNamespace(CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES=1024)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
        CU_LAUNCH_ATTRIBUTE_PRIORITY="priority",
    )
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_NUM_REGS="registers", CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="shared"
    )
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)

    def __init__(self):
        self.functions, self.kernels, self.nodes, self.graphs = {}, {}, {}, {}
        self.dot, self.host = "", range(0)
        self._memory = []

    def function(self, name, *layout, registers=32, shared=0, as_kernel=False):
        """Add a compiled kernel with (offset, size) per parameter; return its handle."""
        known = self.kernels if as_kernel else self.functions
        handle = 0x1000 + 16 * (len(self.functions) + len(self.kernels))
        known[handle] = SimpleNamespace(
            name=name, layout=layout, registers=registers, shared=shared
        )
        return handle

    def node(self, kind, attributes=(), **facts):
        """Add a node; ``kind`` is spelled as in the driver API. Return its handle."""
        handle = 0xABC000 + len(self.nodes)
        node_type = NodeType[f"CU_GRAPH_NODE_TYPE_{kind}"]
        self.nodes[handle] = SimpleNamespace(type=node_type, attributes=dict(attributes), **facts)
        return handle

    def kernel_node(self, func=0, *, kern=0, grid=(1, 1, 1), block=(32, 1, 1), shared=0,
                    pointers=0, extra=0, **attributes):  # fmt: skip
        """Add a kernel node; ``pointers`` and ``extra`` are addresses."""
        params = SimpleNamespace(
            func=func, kern=kern, sharedMemBytes=shared, kernelParams=pointers, extra=extra,
            **{f"{what}Dim{axis}": size for what, extent in (("grid", grid), ("block", block))
               for axis, size in zip("XYZ", extent, strict=True)},
        )  # fmt: skip
        return self.node("KERNEL", attributes, params=params)

    def graph(self, *nodes, edges=()):
        """Add a graph; edges are (source, target, type) by index. Return its handle."""
        handle = 0x770000 + len(self.graphs)
        self.graphs[handle] = SimpleNamespace(nodes=nodes, edges=[(*e, 0)[:3] for e in edges])
        return handle

    def keep(self, data):
        """Keep bytes or words in memory; return their address."""
        kind = ctypes.c_char if isinstance(data, bytes) else ctypes.c_uint64
        kept = (kind * len(data))(*data)
        self._memory.append(kept)
        return ctypes.addressof(kept)

    def parameters(self, *data):
        """Keep a ``kernelParams`` array of addresses, 0 for ``None``; return its address."""
        return self.keep([0 if each is None else self.keep(each) for each in data])

    def extra(self, data, *, tags=(2, 1)):
        """Keep an ``extra`` list: tags 1 (buffer) and 2 (address of its size), then 0."""
        values = {1: self.keep(data), 2: self.keep([len(data)])}
        return self.keep([*(word for tag in tags for word in (tag, values[tag])), 0])

    def cuGraphGetNodes(self, graph, count=0):
        nodes = self.graphs[graph].nodes
        return 0, [*nodes, 0, 0][:count], len(nodes)

    def cuGraphGetEdges(self, graph, count=0):
        nodes, edges = self.graphs[graph].nodes, self.graphs[graph].edges
        ends = [[nodes[edge[end]] for edge in edges][:count] for end in (0, 1)]
        data = [SimpleNamespace(type=edge[2]) for edge in edges][:count]
        return 0, *ends, data, len(edges)

    def cuGraphNodeGetType(self, node):
        return 0, self.nodes[node].type

    def cuGraphChildGraphNodeGetGraph(self, node):
        return 0, self.nodes[node].graph

    def _params(self, node):
        return 0, self.nodes[node].params

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _params

    def cuGraphKernelNodeGetAttribute(self, node, which):
        known = self.nodes[node].attributes
        if known.get(which) == "refused":
            return _INVALID_VALUE, None
        x, y, z = known.get("cluster", (0, 0, 0)) if which == "cluster" else (0, 0, 0)
        return 0, SimpleNamespace(
            clusterDim=SimpleNamespace(x=x, y=y, z=z),
            cooperative=known.get("cooperative", 0),
            priority=known.get("priority", 0),
        )

    def cuGraphDebugDotPrint(self, graph, path, flags):
        Path(path.decode()).write_text(self.dot)
        return (0,)

    def cuFuncGetName(self, function):
        return 0, self.functions[function].name.encode()

    def cuKernelGetName(self, kernel):
        return 0, self.kernels[kernel].name.encode()

    def cuFuncGetParamInfo(self, function, index):
        layout = self.functions[function].layout
        return (0, *layout[index]) if index < len(layout) else (_INVALID_VALUE, None, None)

    def cuKernelGetParamInfo(self, kernel, index):
        layout = self.kernels[kernel].layout
        return (0, *layout[index]) if index < len(layout) else (_INVALID_VALUE, None, None)

    def cuFuncGetAttribute(self, which, function):
        return 0, getattr(self.functions[function], which)

    def cuKernelGetAttribute(self, which, kernel, device):
        assert device == "device 0"
        return 0, getattr(self.kernels[kernel], which)

    def cuCtxGetDevice(self):
        return 0, "device 0"

    def cuPointerGetAttribute(self, which, address):
        return (0, 1) if address in self.host else (_INVALID_VALUE, None)


@pytest.fixture
def driver(monkeypatch):
    """The fake driver, installed as ``cuda.bindings.driver``."""
    fake = FakeDriver()
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    cuda.bindings, bindings.driver = bindings, fake
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake


@pytest.fixture(scope="package")
def target():
    """The reference target for up to two requests."""
    return reference_target("cpu", max_batch_size=2)
