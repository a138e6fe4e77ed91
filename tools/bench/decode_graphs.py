"""Graphs that resemble a decode step of an 8B model, and parts of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from graphkit.graphs.driver import checked, runtime, runtime_stream

LAYERS, ROWS, HIDDEN, KV_WIDTH, FEED_FORWARD = 32, 4, 4096, 1024, 14336
TINY_KERNELS = 1000
_WARM_UPS = 10


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


class Graph:
    """A captured graph.

    ``torch.cuda.CUDAGraph`` runs kernels on the capture stream, this class runs none. The graph's
    memory belongs to torch's cache: other work may overwrite what it computes.

    Args:
        step: What to capture.
        stream: Stream to capture on. No kernel runs on it.
    """

    def __init__(self, step: Callable[[], object], stream: torch.cuda.Stream) -> None:
        self._bindings = bindings = runtime()
        mode = bindings.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        handle = runtime_stream(stream)
        with torch.cuda.stream(stream):
            checked(bindings.cudaStreamBeginCapture(handle, mode))
            step()
            self._template = checked(bindings.cudaStreamEndCapture(handle))[0]
        self.num_nodes = int(checked(bindings.cudaGraphGetNodes(self._template))[-1])
        self._executable: Any = None
        self.instantiate()

    def instantiate(self) -> None:
        """Instantiate the graph, again if it was."""
        if self._executable is not None:
            checked(self._bindings.cudaGraphExecDestroy(self._executable))
        self._executable = checked(self._bindings.cudaGraphInstantiate(self._template, 0))[0]

    def upload(self) -> None:
        """Upload the executable on the current stream."""
        stream = runtime_stream(torch.cuda.current_stream())
        checked(self._bindings.cudaGraphUpload(self._executable, stream))

    def launch(self) -> None:
        """Launch on the current stream."""
        stream = runtime_stream(torch.cuda.current_stream())
        checked(self._bindings.cudaGraphLaunch(self._executable, stream))


class DecodeGraphs:
    """Three graphs over the same weights, 14 GB. Nothing is allocated before ``capture``.

    ``layers`` are 32 layers with merged projections and unfused elementwise kernels, without
    attention over a context. ``products`` are their matrix products alone, ``tiny`` is 1,000
    kernels of one block.

    Attributes:
        graphs: The graph of each name.
        word: Float32 [1] on the device, for kernels outside of the graphs.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}
        self.word = torch.empty(0)
        self._layers: list[Layer] = []

    def capture(
        self, on: torch.cuda.Stream | None = None, *, warm_up_on: torch.cuda.Stream | None = None
    ) -> None:
        """Capture the graphs, once more if they exist. The first call makes the weights.

        Args:
            on: Stream to capture on; ``None`` takes a new one.
            warm_up_on: Stream to run the steps on before; ``None`` takes that of the capture.
        """
        on = torch.cuda.Stream() if on is None else on
        if not self._layers:
            self.word = torch.zeros(1, device="cuda")
            self._x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
            self._layers = [new_layer() for _ in range(LAYERS)]
        torch.cuda.synchronize()
        with torch.cuda.stream(on if warm_up_on is None else warm_up_on):
            for step in self._steps().values():
                step()
        torch.cuda.synchronize()
        self.graphs = {name: Graph(step, on) for name, step in self._steps().items()}

    def run_kernel(self, stream: torch.cuda.Stream) -> None:
        """Run one tiny kernel on a stream, and wait for it."""
        with torch.cuda.stream(stream):
            self.word.add_(1)
        stream.synchronize()

    def replay_ms(self, replays: int) -> dict[str, float]:
        """Return the median GPU milliseconds per replay of each graph on the current stream."""
        return {name: _replay_ms(graph, replays) for name, graph in self.graphs.items()}

    def _steps(self) -> Mapping[str, Callable[[], object]]:
        return {"layers": self._run_layers, "products": self._run_products, "tiny": self._run_tiny}

    def _run_layers(self) -> torch.Tensor:
        x = self._x
        for layer in self._layers:
            qkv = _norm(x) @ layer.qkv
            q, k, v = qkv.split((HIDDEN, KV_WIDTH, KV_WIDTH), dim=-1)
            q, k = _rotated(q), _rotated(k)
            layer.cache[:, :KV_WIDTH].copy_(k)
            layer.cache[:, KV_WIDTH:].copy_(v)
            attended = torch.softmax(q, dim=-1) * v.repeat(1, HIDDEN // KV_WIDTH)
            x = x + attended @ layer.out
            gate, up = (_norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ layer.down
        return x

    def _run_products(self) -> torch.Tensor:
        x = self._x
        for layer in self._layers:
            x = (x @ layer.qkv)[:, :HIDDEN] @ layer.out
            x = (x @ layer.gate_up)[:, :FEED_FORWARD] @ layer.down
        return x

    def _run_tiny(self) -> None:
        for _ in range(TINY_KERNELS):
            self.word.add_(1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * scale).to(x.dtype) * 1.0


def _rotated(x: torch.Tensor) -> torch.Tensor:
    return x * 0.8 + x.roll(1, -1) * 0.6


def _replay_ms(graph: Graph, replays: int) -> float:
    """Return the median milliseconds between events before and after a replay."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_WARM_UPS + replays)
    ]
    for before, after in events:
        before.record()
        graph.launch()
        after.record()
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in events[_WARM_UPS:])
