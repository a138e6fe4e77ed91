"""CUDA graphs that loop on the device: WHILE { SWITCH { one body per size } } in one executable.

Rules of CUDA that shape this file: a child graph must not contain conditional nodes, so loop and
switch are built around the captured bodies; a kernel sets the value of a node's condition through
its handle, in the same launch.
https://docs.nvidia.com/cuda/cuda-runtime-api/cuda_runtime_api/structcudaConditionalNodeParams.html
Checked on cuda-bindings 13.3 with driver 580.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from graphkit.errors import DeviceError
from graphkit.graphs.attribution import NodeOrigin
from graphkit.graphs.cuda_graph import CudaGraph, CudaPool
from graphkit.graphs.driver import (
    checked,
    driver_bytes,
    launch_function,
    runtime,
    runtime_stream,
)
from graphkit.graphs.pool_memory import Allocation, PoolBlock

# extern "C" __global__ void set_condition(cudaGraphConditionalHandle handle, const int* value)
# { cudaGraphSetConditional(handle, *value); }
# As PTX, so that no compiler is needed. The driver resolves the extern function.
_SET_CONDITION = b"""
.version 8.4
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry set_condition(.param .u64 handle, .param .u64 value)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [handle];
    ld.param.u64 %rd2, [value];
    cvta.to.global.u64 %rd3, %rd2;
    ld.global.u32 %r1, [%rd3];
    {
        .param .b64 param0;
        .param .b32 param1;
        st.param.b64 [param0], %rd1;
        st.param.b32 [param1], %r1;
        call.uni cudaGraphSetConditional, (param0, param1);
    }
    ret;
}
\0"""

_ASSIGN_DEFAULT = 1
"""``cudaGraphCondAssignDefault``: set the default at each launch. The bindings do not have it."""


def no_loop_reason() -> str:
    """Return the reason why CUDA graphs cannot loop here, or an empty string."""
    return "" if runtime() else "cuda-bindings are not installed: install graphkit-cuda[cuda]"


class CudaLoop:
    """An executable that runs a prologue once, then bodies until the device ends it.

    Implements ``LoopGraph``. Made by ``CudaBackend.loop``, see there.
    """

    def __init__(
        self,
        pool: CudaPool,
        prologue: CudaGraph,
        bodies: Sequence[CudaGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> None:
        bindings = runtime()
        assert bindings is not None, "the backend has no no_loop_reason"
        self._pool, self._bindings = pool, bindings
        self._kept = again, body
        self.output: Any = prologue.output
        self.pool_bytes = 0
        self.origins: tuple[NodeOrigin, ...] = ()
        self.allocations: tuple[Allocation, ...] = ()
        # If a later call fails, what was made is destroyed, and that call's error is raised.
        with ExitStack() as made:
            self.graph: Any = checked(bindings.cudaGraphCreate(0))[0]
            made.callback(bindings.cudaGraphDestroy, self.graph)
            self._build(prologue, bodies, again, body)
            before = driver_bytes(pool.device)
            try:
                executable = checked(bindings.cudaGraphInstantiate(self.graph, 0))[0]
            except DeviceError as error:
                raise DeviceError(
                    "CUDA refused a loop over the captured graphs, which may contain kernels, "
                    f"copies and fills, but no collectives of NCCL: {error}"
                ) from error
            made.callback(bindings.cudaGraphExecDestroy, executable)
            stream = runtime_stream(torch.cuda.current_stream())
            checked(bindings.cudaGraphUpload(executable, stream))
            self.executable_bytes = max(0, driver_bytes(pool.device) - before)
            self._launch = launch_function(executable)
            self._made = made.pop_all()
        self.num_nodes = prologue.num_nodes + sum(graph.num_nodes for graph in bodies)

    def replay(self) -> None:
        """Launch on the current stream, after replays of the pool on other streams.

        One ``cudaGraphLaunch`` and no other CUDA call, unless the stream has changed.
        """
        self._pool.launch(self._launch)

    def poll(self) -> None:
        """Do nothing: the device advances by itself."""

    def join(self) -> None:
        """See ``LoopGraph.join``. Does not wait."""
        self._pool.wait_for_replays()

    def pool_memory(self) -> list[PoolBlock]:
        """Return nothing: the memory belongs to the bodies."""
        return []

    def wait(self) -> None:
        """Wait until the device has finished all launches."""
        torch.cuda.synchronize(self._pool.device)

    def close(self) -> None:
        """Wait for the launches and destroy the executable. The bodies stay open."""
        if self.graph is not None:
            self.wait()
            self._made.close()
            self.graph = self.output = None

    def _build(
        self,
        prologue: CudaGraph,
        bodies: Sequence[CudaGraph],
        again: torch.Tensor,
        body: torch.Tensor,
    ) -> None:
        """Add all nodes to the graph."""
        first = self._add_child(self.graph, [], prologue)
        while_handle = self._create_handle(1, _ASSIGN_DEFAULT)
        (inside,), _ = self._add_conditional(self.graph, [first], while_handle, "While", 1)
        if len(bodies) == 1:
            last = self._add_child(inside, [], bodies[0])
        else:
            switch_handle = self._create_handle(0, 0)
            chosen = self._add_set_condition(inside, [], switch_handle, body)
            cases, last = self._add_conditional(
                inside, [chosen], switch_handle, "Switch", len(bodies)
            )
            for case, graph in zip(cases, bodies, strict=True):
                self._add_child(case, [], graph)
        self._add_set_condition(inside, [last], while_handle, again)

    def _create_handle(self, default: int, flags: int) -> Any:
        create = self._bindings.cudaGraphConditionalHandleCreate
        return checked(create(self.graph, default, flags))[0]

    def _add_child(self, graph: Any, after: list[Any], child: CudaGraph) -> Any:
        """Add a captured graph as a node; CUDA clones it."""
        template = self._bindings.cudaGraph_t(child.graph.raw_cuda_graph())
        add = self._bindings.cudaGraphAddChildGraphNode
        return checked(add(graph, after or None, len(after), template))[0]

    def _add_conditional(
        self, graph: Any, after: list[Any], handle: Any, kind: str, size: int
    ) -> tuple[list[Any], Any]:
        """Add a conditional node; return the graphs of its bodies and the node."""
        bindings = self._bindings
        params = bindings.cudaGraphNodeParams()
        params.type = bindings.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = handle
        kinds = bindings.cudaGraphConditionalNodeType
        params.conditional.type = getattr(kinds, f"cudaGraphCondType{kind}")
        params.conditional.size = size
        add = bindings.cudaGraphAddNode
        node = checked(add(graph, after or None, None, len(after), params))[0]
        return list(params.conditional.phGraph_out), node

    def _add_set_condition(
        self, graph: Any, after: list[Any], handle: Any, value: torch.Tensor
    ) -> Any:
        """Add a kernel that sets a condition to ``value``, int32 [1]."""
        from cuda.bindings import driver

        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = _set_condition_kernel(self._pool.device_index)
        for axis in "XYZ":
            setattr(params, f"gridDim{axis}", 1)
            setattr(params, f"blockDim{axis}", 1)
        params.kernelParams = (
            (int(handle), value.data_ptr()), (ctypes.c_uint64, ctypes.c_uint64),
        )  # fmt: skip
        nodes = [driver.CUgraphNode(int(node)) for node in after]
        add = driver.cuGraphAddKernelNode
        node = checked(add(driver.CUgraph(int(graph)), nodes or None, len(nodes), params))[0]
        return self._bindings.cudaGraphNode_t(int(node))


@cache
def _set_condition_kernel(device_index: int) -> Any:
    """Load the kernel into a device's primary context, once per process."""
    from cuda.bindings import driver

    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # torch makes the primary context current
        module = checked(driver.cuModuleLoadData(_SET_CONDITION))[0]
    return checked(driver.cuModuleGetFunction(module, b"set_condition"))[0]
