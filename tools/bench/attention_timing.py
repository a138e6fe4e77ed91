"""Time per call of attention inside a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from attention_batch import Batch

_GRAPH_BYTES = 512 << 20
"""Least bytes that the calls of a graph read, so that the launch of the graph does not count."""
_LEAST_CALLS, _MOST_CALLS = 8, 128
_SLOW_US = 30e3
"""A graph that takes longer is replayed once."""


class Calls:
    """Calls over all layers of a batch in turn, captured in one graph.

    On the CPU they run without a graph.

    Args:
        act: Runs one layer, given its index.
        batch: The batch.
        rounds: Replays, of which the median counts.
    """

    def __init__(self, act: Callable[[int], object], batch: Batch, rounds: int) -> None:
        self._act, self._layers, self._rounds = act, batch.layers, rounds
        self._has_graphs = batch.device.type == "cuda"
        calls = -(-_GRAPH_BYTES // batch.condition.cache_bytes)
        calls = max(_LEAST_CALLS, min(max(calls, batch.layers), _MOST_CALLS))
        self._calls = calls if self._has_graphs else 1

    @property
    def us(self) -> float:
        """Median microseconds per call."""
        if not self._has_graphs:
            return self._host_us()
        self._act(0)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(self._calls):
                self._act(call % self._layers)
        times = [self._replay_us(graph)]
        rounds = self._rounds if times[0] < _SLOW_US else 1
        times = [self._replay_us(graph) for _ in range(rounds)]
        graph.reset()
        return median(times) / self._calls

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Time a replay behind another one, during which the host enqueues it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def _host_us(self) -> float:
        times = []
        for _ in range(self._rounds):
            began = time.perf_counter()
            self._act(0)
            times.append((time.perf_counter() - began) * 1e6)
        return median(times)
