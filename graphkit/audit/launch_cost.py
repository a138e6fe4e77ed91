"""Host time of graph launches, and graphs of trivial kernels to compare it with.

The driver launches kernels in one line in nearly constant time, for any number of them (NVIDIA,
"Constant Time Launch for Straight-Line CUDA Graphs"). Other graphs take host time for every node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from graphlib import TopologicalSorter
from statistics import median
from typing import Any, Self

import torch

from graphkit.graphs.cuda import CudaBackend
from graphkit.graphs.driver import checked

_WARM_UPS, _LAUNCHES = 3, 15
"""Launches of each variant before the measured ones, and measured: enough for a steady median."""
REPETITIONS = _WARM_UPS + _LAUNCHES
"""Launches of each variant in one measurement."""


class TrivialGraphs:
    """Executable graphs of any shape whose nodes all are one kernel that adds 1 to a number.

    Needs cuda-bindings. A context manager that destroys the graphs when its block ends.

    Args:
        backend: Captures the kernel. Its graphs do not change.

    Attributes:
        word: The number, float32 [1]. Each kernel adds 1; kernels that run at the same time
            may overwrite each other's result.

    Raises:
        DeviceError: CUDA refused a call.
    """

    def __init__(self, backend: CudaBackend) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._executables: list[Any] = []
        self.word = torch.zeros(1, device=backend.device)
        with backend.session():
            backend.warm_up(self._add)
            self._kernel = backend.capture(self._add)
        template = driver.CUgraph(self._kernel.graph.raw_cuda_graph())
        (node,) = checked(driver.cuGraphGetNodes(template, 1))[0][:1]
        # The parameters point into the captured graph, which stays open.
        self._parameters = checked(driver.cuGraphKernelNodeGetParams(node))[0]

    def chain(self, length: int) -> Any:
        """Return the executable of a linear graph; arguments and errors as for ``build``."""
        return self.build({i: [i - 1] if i else [] for i in range(length)})

    def build(self, dependencies: Mapping[int, Sequence[int]]) -> Any:
        """Return the executable (``CUgraphExec``) of a graph, valid until the block ends.

        Args:
            dependencies: For every node, the nodes that it waits for.

        Raises:
            DeviceError: CUDA refused a call.
        """
        driver, nodes = self._driver, dict[int, Any]()
        graph = checked(driver.cuGraphCreate(0))[0]
        try:
            for index in TopologicalSorter(dependencies).static_order():
                before = [nodes[dependency] for dependency in dict.fromkeys(dependencies[index])]
                added = driver.cuGraphAddKernelNode(graph, before, len(before), self._parameters)
                nodes[index] = checked(added)[0]
            executable = checked(driver.cuGraphInstantiate(graph, 0))[0]
        finally:
            driver.cuGraphDestroy(graph)
        self._executables.append(executable)
        return executable

    def close(self) -> None:
        """Destroy the graphs. The device must have finished them."""
        while self._executables:
            self._driver.cuGraphExecDestroy(self._executables.pop())
        self._kernel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self) -> None:
        self.word.add_(1)


def driver_executable(graph: Any) -> Any:
    """Return the executable (``CUgraphExec``) of a ``CudaGraph``, valid until it is closed."""
    from cuda.bindings import driver

    return driver.CUgraphExec(graph.graph.raw_cuda_graph_exec())


def launch_us(
    variants: Mapping[str, Sequence[Any]], prepare: Callable[[str], object]
) -> dict[str, float]:
    """Return the median host microseconds of the launches of each variant, from an idle device.

    Launches on the current stream and waits for the device after each measurement. The variants
    take turns, so that load on the machine affects all of them.

    Args:
        variants: Executables (``CUgraphExec``) that are launched one after the other, by name.
        prepare: Called with the name before each measurement.

    Raises:
        DeviceError: CUDA refused a launch.
    """
    from cuda.bindings import driver

    launch = driver.cuGraphLaunch
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPETITIONS):
        for name, executables in variants.items():
            prepare(name)
            torch.cuda.synchronize()
            began = time.perf_counter()
            results = [launch(executable, stream) for executable in executables]
            samples[name].append((time.perf_counter() - began) * 1e6)
            torch.cuda.synchronize()
            for result in results:
                checked(result)
    return {name: median(each[_WARM_UPS:]) for name, each in samples.items()}
