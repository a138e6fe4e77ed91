"""Graphs that resemble a decode step of an 8B model, and parts of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from graphkit.graphs.driver import checked, count_nodes, runtime, runtime_stream

LAYERS, ROWS, HIDDEN, KV_WIDTH, FEED_FORWARD = 32, 4, 4096, 1024, 14336
TINY_KERNELS, PLAIN_KERNELS = 1000, 500
CLOCK_CYCLES = 2_000_000
_WARM_UPS, _PLAIN_ROUNDS = 5, 5


@dataclass
class Layer:
    """Weights of one layer, bf16, and the rows of its KV cache that a step writes."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    cache: torch.Tensor


def new_layer() -> Layer:
    """Return a layer with random weights that keep activations at their size."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return empty.normal_(std=rows**-0.5)

    return Layer(
        weight(HIDDEN, HIDDEN + 2 * KV_WIDTH),
        weight(HIDDEN, HIDDEN),
        weight(HIDDEN, 2 * FEED_FORWARD),
        weight(FEED_FORWARD, HIDDEN),
        torch.zeros(ROWS, 2 * KV_WIDTH, dtype=torch.bfloat16, device="cuda"),
    )


class Launchable(Protocol):
    """A captured step.

    Attributes:
        num_nodes: Number of its nodes.
    """

    num_nodes: int

    def launch(self) -> None:
        """Launch on the current stream."""


class Graph:
    """A graph captured on the current stream, which must not be the default stream.

    ``torch.cuda.CUDAGraph`` runs kernels on the capture stream, this class runs none. The graph's
    memory belongs to torch's cache: other work may overwrite what it computes.

    Args:
        step: What to capture.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._bindings = bindings = runtime()
        mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        stream = runtime_stream(torch.cuda.current_stream())
        checked(bindings.cudaStreamBeginCapture(stream, mode))
        step()
        template = checked(bindings.cudaStreamEndCapture(stream))[0]
        self.num_nodes = int(checked(bindings.cudaGraphGetNodes(template))[-1])
        self._executable: Any = checked(bindings.cudaGraphInstantiate(template, 0))[0]

    def launch(self) -> None:
        """Launch on the current stream."""
        stream = runtime_stream(torch.cuda.current_stream())
        checked(self._bindings.cudaGraphLaunch(self._executable, stream))


class TorchGraph:
    """A graph captured by ``torch.cuda.graph``, on the stream and in the pool that it chooses."""

    def __init__(self, step: Callable[[], object]) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            step()
        graph.instantiate()
        self.num_nodes = count_nodes(graph)
        self._graph = graph

    def launch(self) -> None:
        """Launch on the current stream."""
        self._graph.replay()


class DecodeGraphs:
    """Graphs over the same weights, 14 GB. All methods use the current stream.

    ``layers`` are 32 layers with merged projections and unfused elementwise kernels, without
    attention over a context. ``tiny`` is 1,000 kernels of one block. ``clock`` is one kernel that
    runs for ``CLOCK_CYCLES`` cycles, so that its time shows the clock of the SMs.

    Attributes:
        graphs: The graph of each name.
        word: Float32 [1] on the device, for kernels outside of the graphs.
        weight: A weight, bf16 [HIDDEN, HIDDEN].
    """

    def __init__(self) -> None:
        self.graphs: dict[str, Launchable] = {}
        self.word = self.weight = torch.empty(0)
        self._layers: list[Layer] = []

    def allocate(self) -> None:
        """Make the weights."""
        self.word = torch.zeros(1, device="cuda")
        self._x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
        self._layers = [new_layer() for _ in range(LAYERS)]
        self.weight = self._layers[0].out

    def warm_up(self) -> None:
        """Run the steps, which allocates their memory and loads their kernels."""
        for step in self._steps().values():
            step()

    def capture(self, new_graph: Callable[[Callable[[], object]], Launchable] = Graph) -> None:
        """Capture the graphs, which runs no kernel with ``Graph``."""
        self.graphs = {name: new_graph(step) for name, step in self._steps().items()}

    def launch(self) -> None:
        """Launch each graph once."""
        for graph in self.graphs.values():
            graph.launch()

    def run_layers(
        self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            product: Multiplies activations with a weight.
        """
        x = self._x
        for layer in self._layers:
            qkv = product(_norm(x), layer.qkv)
            q, k, v = qkv.split((HIDDEN, KV_WIDTH, KV_WIDTH), dim=-1)
            q, k = _rotated(q), _rotated(k)
            layer.cache[:, :KV_WIDTH].copy_(k)
            layer.cache[:, KV_WIDTH:].copy_(v)
            attended = torch.softmax(q, dim=-1) * v.repeat(1, HIDDEN // KV_WIDTH)
            x = x + product(attended, layer.out)
            gate, up = product(_norm(x), layer.gate_up).chunk(2, dim=-1)
            x = x + product(torch.nn.functional.silu(gate) * up, layer.down)
        return x

    def run_products(self) -> None:
        """Run the matrix products of the layers alone, on any activations."""
        for layer in self._layers:
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                torch.matmul(weight.new_empty(ROWS, len(weight)), weight)

    def replay_ms(self, replays: int) -> dict[str, float]:
        """Return the median GPU milliseconds per replay of each graph.

        ``plain`` is the time of ``PLAIN_KERNELS`` tiny kernels without a graph.
        """
        ms = {name: _replay_ms(graph, replays) for name, graph in self.graphs.items()}
        return {**ms, "plain": self._plain_ms()}

    def _steps(self) -> Mapping[str, Callable[[], object]]:
        return {"layers": self.run_layers, "tiny": self._run_tiny, "clock": _run_clock}

    def _plain_ms(self) -> float:
        """Queue kernels behind one that runs until the last is queued, so that the host costs 0."""
        rounds = [_timing_events() for _ in range(_PLAIN_ROUNDS)]
        for before, after in rounds:
            torch.cuda._sleep(10 * CLOCK_CYCLES)
            before.record()
            for _ in range(PLAIN_KERNELS):
                self.word.add_(1)
            after.record()
            torch.cuda.synchronize()
        return _median_ms(rounds)

    def _run_tiny(self) -> None:
        for _ in range(TINY_KERNELS):
            self.word.add_(1)


def _run_clock() -> None:
    torch.cuda._sleep(CLOCK_CYCLES)


def _norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * scale).to(x.dtype) * 1.0


def _rotated(x: torch.Tensor) -> torch.Tensor:
    return x * 0.8 + x.roll(1, -1) * 0.6


def _replay_ms(graph: Launchable, replays: int) -> float:
    """Return the median milliseconds between events before and after a replay."""
    rounds = [_timing_events() for _ in range(_WARM_UPS + replays)]
    for before, after in rounds:
        before.record()
        graph.launch()
        after.record()
    torch.cuda.synchronize()
    return _median_ms(rounds[_WARM_UPS:])


def _timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _median_ms(rounds: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return median(before.elapsed_time(after) for before, after in rounds)
