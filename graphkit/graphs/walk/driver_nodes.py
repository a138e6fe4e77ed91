"""Nodes and edges of a CUDA graph's template, read through the driver API.

Takes about 10 us per node.

Drivers up to 580 have no query for the bodies of a conditional node. But ``cuGraphDebugDotPrint``
writes them to a DOT file with the handle of every node, and a walk needs only the handles.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from graphkit.errors import InspectError
from graphkit.graphs.driver import checked
from graphkit.graphs.walk.arguments import Parameter
from graphkit.graphs.walk.kernels import Kernel, TritonKernels
from graphkit.records import Edge

_GRAPH = re.compile(r"subgraph cluster_(\d+) \{")
_NODE = re.compile(r'"graph_\d+_node_(\d+)"\[(.*?)\];', re.DOTALL)
_EDGE = re.compile(r'"graph_\d+_node_(\d+)" -> "graph_\d+_node_(\d+)"')
_HANDLE = re.compile(r"node handle\b.*?(0x[0-9A-Fa-f]+)", re.DOTALL)
_BODY = re.compile(r"\|graph_(\d+)\}")


@dataclass(frozen=True, slots=True)
class ConditionalBody:
    """A graph inside of a conditional node.

    Attributes:
        nodes: Handles of its nodes, in order of creation.
        edges: Its edges, as indices into ``nodes``.
    """

    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]


def conditional_bodies(driver: Any, graph: Any) -> Mapping[int, tuple[ConditionalBody, ...]]:
    """Return the bodies of every conditional node of a graph by the node's handle.

    Conditional nodes inside of child graphs and of other bodies are included.
    """
    flags = driver.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        checked(driver.cuGraphDebugDotPrint(graph, str(path).encode(), flags))
        return parse_bodies(path.read_text(errors="replace"))


def parse_bodies(dot: str) -> Mapping[int, tuple[ConditionalBody, ...]]:
    """Return the bodies in the text of ``cuGraphDebugDotPrint``, with handles."""
    _, *pieces = _GRAPH.split(dot)  # graph numbers and texts, alternating
    numbered = zip(pieces[::2], pieces[1::2], strict=True)
    graphs = {number: (_nodes(text), _edges(text)) for number, text in numbered}
    bodies = {}
    for nodes, _ in graphs.values():
        for handle, label in nodes:
            if "CONDITIONAL" in label:
                bodies[handle] = tuple(_body(*graphs[n]) for n in _BODY.findall(label))
    return bodies


def _body(nodes: list[tuple[int, str]], edges: tuple[tuple[int, int], ...]) -> ConditionalBody:
    return ConditionalBody(tuple(handle for handle, _ in nodes), edges)


def _nodes(text: str) -> list[tuple[int, str]]:
    """Return handle and label of each node, in the order of the nodes' numbers."""
    nodes = sorted((int(number), label) for number, label in _NODE.findall(text))
    return [(_handle(label), label) for _, label in nodes]


def _handle(label: str) -> int:
    match = _HANDLE.search(label)
    return int(match.group(1), 16) if match else 0


def _edges(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(source), int(target)) for source, target in _EDGE.findall(text))


_KINDS = {
    "KERNEL": "kernel", "MEMCPY": "memcpy", "MEMSET": "memset", "HOST": "host",
    "GRAPH": "child graph", "EMPTY": "empty", "WAIT_EVENT": "event wait",
    "EVENT_RECORD": "event record", "MEM_ALLOC": "allocation", "MEM_FREE": "free",
    "CONDITIONAL": "conditional", "BATCH_MEM_OP": "memory operation",
    "EXT_SEMAS_SIGNAL": "semaphore signal", "EXT_SEMAS_WAIT": "semaphore wait",
}  # fmt: skip
Extent = tuple[int, ...]


@dataclass(slots=True, kw_only=True)  # not frozen: frozen dataclasses are slower to create
class DriverNode:
    """A node; fields are those of ``graphkit.records.Node``.

    Attributes:
        parameters: A kernel's parameters. A memcpy or memset has its operands in the same form.
        parent: Index of the node that contains it; ``None`` for the graph's own nodes.
    """

    kind: str
    name: str
    grid: Extent = ()
    block: Extent = ()
    cluster: Extent = ()
    shared_memory_bytes: int = 0
    registers: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    parent: int | None = None


class DriverWalk:
    """Reads a graph's template, by its handle.

    Attributes:
        nodes: In order of creation; nodes of child graphs and bodies follow all nodes of the graph
            around them.
        edges: Dependencies by indices of ``nodes``; each is between nodes of one graph.

    Raises:
        InspectError: cuda-bindings are not installed.
    """

    def __init__(self, handle: int) -> None:
        self._driver = _driver()
        self._graph = self._driver.CUgraph(handle)
        self._kernels: dict[int, Kernel] = {}
        self._triton = TritonKernels()
        self.nodes: list[DriverNode] = []
        self.edges: list[Edge] = []
        self._walk_graph(self._graph, None)

    @cached_property
    def _bodies(self) -> Mapping[int, tuple[ConditionalBody, ...]]:
        return conditional_bodies(self._driver, self._graph)

    def _walk_graph(self, graph: Any, parent: int | None) -> None:
        d = self._driver
        count = checked(d.cuGraphGetNodes(graph))[-1]
        handles = checked(d.cuGraphGetNodes(graph, count))[0][:count] if count else []
        first = len(self.nodes)
        index = {int(handle): first + i for i, handle in enumerate(handles)}
        self.edges += self._read_edges(graph, index)
        self._walk(handles, parent)

    def _walk_body(self, body: ConditionalBody, parent: int) -> None:
        first = len(self.nodes)
        self.edges += [Edge(source=first + a, target=first + b) for a, b in body.edges]
        self._walk([self._driver.CUgraphNode(handle) for handle in body.nodes], parent)

    def _walk(self, handles: Sequence[Any], parent: int | None) -> None:
        """Read the nodes of one graph, then the nodes inside of them."""
        containers: list[tuple[int, str, Any]] = []
        for handle in handles:
            kind = _kind(checked(self._driver.cuGraphNodeGetType(handle))[0])
            if kind in ("child graph", "conditional"):
                containers.append((len(self.nodes), kind, handle))
            self.nodes.append(self._node(kind, handle, parent))
        for index, kind, handle in containers:
            if kind == "child graph":
                child = checked(self._driver.cuGraphChildGraphNodeGetGraph(handle))[0]
                self._walk_graph(child, index)
                continue
            for body in self._bodies.get(int(handle), ()):
                self._walk_body(body, index)

    def _read_edges(self, graph: Any, index: Mapping[int, int]) -> Iterator[Edge]:
        get_edges = self._driver.cuGraphGetEdges
        count = checked(get_edges(graph))[-1]
        if not count:
            return
        sources, targets, data, _ = checked(get_edges(graph, count))
        for source, target, edge in zip(sources[:count], targets[:count], data, strict=False):
            kind = "programmatic" if int(edge.type) == 1 else "full"
            yield Edge(source=index[int(source)], target=index[int(target)], kind=kind)

    def _node(self, kind: str, handle: Any, parent: int | None) -> DriverNode:
        read: Callable[[Any], dict[str, Any]] | None = {
            "kernel": self._kernel, "memcpy": self._memcpy, "memset": self._memset,
        }.get(kind)  # fmt: skip
        facts = {"name": kind} if read is None else read(handle)
        return DriverNode(kind=kind, parent=parent, **facts)

    def _kernel(self, handle: Any) -> dict[str, Any]:
        p = checked(self._driver.cuGraphKernelNodeGetParams(handle))[0]
        key = int(p.func) or int(p.kern)
        if key not in self._kernels:
            self._kernels[key] = Kernel(self._driver, p.func, p.kern, self._triton)
        kernel = self._kernels[key]
        cluster, attributes = self._launch_attributes(handle)
        return {
            "name": kernel.name,
            "grid": (p.gridDimX, p.gridDimY, p.gridDimZ),
            "block": (p.blockDimX, p.blockDimY, p.blockDimZ),
            "cluster": cluster,
            "shared_memory_bytes": p.sharedMemBytes + kernel.static_shared_bytes,
            "registers": kernel.registers,
            "attributes": attributes,
            "parameters": tuple(kernel.parameters(int(p.kernelParams), int(p.extra))),
        }

    def _launch_attributes(self, handle: Any) -> tuple[Extent, dict[str, str]]:
        """Return the cluster's extent, and the attributes that are not at their defaults."""
        which = self._driver.CUlaunchAttributeID
        cluster: Extent = ()
        attributes = {}
        value = self._attribute(handle, which.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        if value is not None and value.clusterDim.x:
            cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
        value = self._attribute(handle, which.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        if value is not None and value.cooperative:
            attributes["cooperative"] = "yes"
        value = self._attribute(handle, which.CU_LAUNCH_ATTRIBUTE_PRIORITY)
        if value is not None and value.priority:
            attributes["priority"] = str(value.priority)
        return cluster, attributes

    def _attribute(self, handle: Any, which: Any) -> Any | None:
        """Return an attribute of a launch; ``None`` if the device does not support it."""
        error, value = self._driver.cuGraphKernelNodeGetAttribute(handle, which)
        return value if int(error) == 0 else None

    def _memcpy(self, handle: Any) -> dict[str, Any]:
        p = checked(self._driver.cuGraphMemcpyNodeGetParams(handle))[0]
        size = p.WidthInBytes * max(p.Height, 1) * max(p.Depth, 1)
        target = int(p.dstDevice) or int(p.dstHost)
        source = int(p.srcDevice) or int(p.srcHost)
        return {
            "name": f"memcpy of {size} bytes",
            "parameters": _numbers(target=target, source=source, bytes=size),
        }

    def _memset(self, handle: Any) -> dict[str, Any]:
        p = checked(self._driver.cuGraphMemsetNodeGetParams(handle))[0]
        size = p.elementSize * p.width * max(p.height, 1)
        return {
            "name": f"memset of {size} bytes",
            "parameters": _numbers(
                target=int(p.dst),
                value=p.value,
                element=p.elementSize,
                width=p.width,
                height=p.height,
            ),
        }


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise InspectError(
            "cannot inspect a CUDA graph: cuda-bindings are missing. "
            "Install the extra: pip install 'graphkit-cuda[cuda]'."
        ) from None
    return driver


@cache
def _kind(node_type: Any) -> str:
    name = str(node_type.name).removeprefix("CU_GRAPH_NODE_TYPE_")
    return _KINDS.get(name, name.lower().replace("_", " "))


def _numbers(**values: int) -> tuple[Parameter, ...]:
    """Return operands in the form of a kernel's eight-byte parameters."""
    return tuple(
        Parameter(8 * i, 8, value.to_bytes(8, "little"), name)
        for i, (name, value) in enumerate(values.items())
    )
