"""The reference target, and a CUDA driver that knows the graphs a test describes.

The driver answers as cuda-bindings do: every call returns an error and its values, which are
``None`` after an error. Parameters lie in real memory, to be read from there.
"""
# ruff: noqa: N802, N815 - the names are the driver's

from __future__ import annotations

import ctypes
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from graphkit.reference import reference_target

_REFUSED = 1


class NodeType(Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13
    CU_GRAPH_NODE_TYPE_LATER_THING = 99


class FakeDriver:
    """Knows kernels, graphs and nodes by handle; ``drawing`` is what it draws."""

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
        self.drawing, self.host = "", range(0)
        self._memory = []

    def function(self, name, *layout, registers=32, shared=0, as_kernel=False):
        """A compiled kernel with (offset, size) per parameter; returns its handle."""
        known = self.kernels if as_kernel else self.functions
        handle = 0x1000 + 16 * (len(self.functions) + len(self.kernels))
        known[handle] = SimpleNamespace(
            name=name, layout=layout, registers=registers, shared=shared
        )
        return handle

    def node(self, kind, attributes=(), **facts):
        """A node of a kind as the driver spells it; returns its handle."""
        handle = 0xABC000 + len(self.nodes)
        node_type = NodeType[f"CU_GRAPH_NODE_TYPE_{kind}"]
        self.nodes[handle] = SimpleNamespace(type=node_type, attributes=dict(attributes), **facts)
        return handle

    def kernel_node(self, func=0, *, kern=0, grid=(1, 1, 1), block=(32, 1, 1), shared=0,
                    pointers=0, extra=0, **attributes):  # fmt: skip
        """A kernel node; ``pointers`` and ``extra`` are addresses."""
        params = SimpleNamespace(
            func=func, kern=kern, sharedMemBytes=shared, kernelParams=pointers, extra=extra,
            **{f"{what}Dim{axis}": size for what, extent in (("grid", grid), ("block", block))
               for axis, size in zip("XYZ", extent, strict=True)},
        )  # fmt: skip
        return self.node("KERNEL", attributes, params=params)

    def graph(self, *nodes, edges=()):
        """A graph of nodes and edges (source, target, type) by place; returns its handle."""
        handle = 0x770000 + len(self.graphs)
        self.graphs[handle] = SimpleNamespace(nodes=nodes, edges=[(*e, 0)[:3] for e in edges])
        return handle

    def keep(self, data):
        """The address of bytes, or of words, in memory."""
        kind = ctypes.c_char if isinstance(data, bytes) else ctypes.c_uint64
        made = (kind * len(data))(*data)
        self._memory.append(made)
        return ctypes.addressof(made)

    def parameters(self, *data):
        """``kernelParams``: an array of addresses; ``None`` stands for none."""
        return self.keep([0 if each is None else self.keep(each) for each in data])

    def extra(self, data, *, tags=(2, 1)):
        """``extra``: tags with values, ended by 0; 1 is the buffer, 2 where its size stands."""
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
            return _REFUSED, None
        x, y, z = known.get("cluster", (0, 0, 0)) if which == "cluster" else (0, 0, 0)
        return 0, SimpleNamespace(
            clusterDim=SimpleNamespace(x=x, y=y, z=z),
            cooperative=known.get("cooperative", 0),
            priority=known.get("priority", 0),
        )

    def cuGraphDebugDotPrint(self, graph, path, flags):
        Path(path.decode()).write_text(self.drawing)
        return (0,)

    def cuFuncGetName(self, function):
        return 0, self.functions[function].name.encode()

    def cuKernelGetName(self, kernel):
        return 0, self.kernels[kernel].name.encode()

    def cuFuncGetParamInfo(self, function, index):
        layout = self.functions[function].layout
        return (0, *layout[index]) if index < len(layout) else (_REFUSED, None, None)

    def cuKernelGetParamInfo(self, kernel, index):
        layout = self.kernels[kernel].layout
        return (0, *layout[index]) if index < len(layout) else (_REFUSED, None, None)

    def cuFuncGetAttribute(self, which, function):
        return 0, getattr(self.functions[function], which)

    def cuKernelGetAttribute(self, which, kernel, device):
        assert device == "device 0"
        return 0, getattr(self.kernels[kernel], which)

    def cuCtxGetDevice(self):
        return 0, "device 0"

    def cuPointerGetAttribute(self, which, address):
        return (0, 1) if address in self.host else (_REFUSED, None)


@pytest.fixture
def driver(monkeypatch):
    """The fake, as ``cuda.bindings.driver``."""
    fake = FakeDriver()
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    cuda.bindings, bindings.driver = bindings, fake
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake


@pytest.fixture(scope="package")
def target():
    """The reference models, for two requests."""
    return reference_target("cpu", max_batch_size=2)
