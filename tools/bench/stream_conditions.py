"""The conditions under which ``streams.py`` replays graphs.

An order is what a process does before its first replay: pairs of a stream and an act.
``ONE_STREAM`` and ``TWO_STREAMS`` are known to differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import stream_acts as acts
import torch
from decode_graphs import DecodeGraphs
from graphkit_graphs import WarmUpsOnCaptureStream
from stream_acts import Act, allocate, capture, elsewhere, launch, warm_up

from graphkit.graphs import CudaBackend

MAIN, POOL, DEFAULT = "main", "pool", "default"
"""Streams: two of torch's pool, and the default stream."""
Order = Sequence[tuple[str, Act]]
ONE_STREAM: Order = ((MAIN, allocate), (MAIN, warm_up), (MAIN, capture))
"""A fast order."""
TWO_STREAMS: Order = ((DEFAULT, allocate), (MAIN, warm_up), (MAIN, capture))
"""A slow order. It is the usual one: steps warm up on the stream that captures them."""


@dataclass(frozen=True)
class Condition:
    """A condition.

    Attributes:
        order: What happens before the first replay.
        then: What happens between replays, by the name of the state that follows.
        replays: Stream of the replays and of what happens between them.
    """

    order: Order
    then: Mapping[str, Act] = field(default_factory=dict)
    replays: str = MAIN


def with_graphkit(new_backend: type[CudaBackend]) -> Condition:
    """Return a condition with runners of graphkit and eager steps on the default stream."""
    captured = acts.capture_with_graphkit(new_backend)
    return Condition(
        ((DEFAULT, allocate), (DEFAULT, captured)), {"eager steps": warm_up}, replays=DEFAULT
    )


ORDERS = {
    "one stream": Condition(ONE_STREAM),
    "two streams": Condition(TWO_STREAMS),
    "warm-up on both streams": Condition((TWO_STREAMS[0], (DEFAULT, warm_up), *TWO_STREAMS[1:])),
    "kernel before the weights": Condition(((DEFAULT, acts.kernel_in_new_memory), *ONE_STREAM)),
    "kernel before the warm-up": Condition(
        (ONE_STREAM[0], (DEFAULT, acts.kernel), *ONE_STREAM[1:])
    ),
    "captured on another stream": Condition((*ONE_STREAM[:2], (POOL, capture), (POOL, launch))),
    "torch.cuda.graph": Condition((*ONE_STREAM[:2], (MAIN, acts.capture_with_torch))),
}
"""What determines the state of a process?"""
GRAPHKIT = {
    "graphkit": with_graphkit(CudaBackend),
    "graphkit, other warm-ups": with_graphkit(WarmUpsOnCaptureStream),
}
"""Does graphkit stay fast, and would it if it warmed up on its capture stream?"""
LATER = {
    "steps after": Condition(
        ONE_STREAM,
        {
            "other kernels elsewhere": elsewhere(acts.other_kernels),
            "small product elsewhere": elsewhere(acts.small_product),
            "products elsewhere": elsewhere(acts.products),
            "captured again": capture,
        },
    ),
    "products after": Condition(
        ONE_STREAM,
        {
            "small product elsewhere": elsewhere(acts.small_product),
            "kernels with pauses": elsewhere(acts.kernels_with_pauses),
            "products elsewhere": elsewhere(acts.products),
        },
    ),
    "kernels after": Condition(
        ONE_STREAM,
        {
            "norm elsewhere": elsewhere(acts.norm),
            "reduction elsewhere": elsewhere(acts.reduction),
            "2 kernels elsewhere": elsewhere(acts.kernels(2)),
            "3 kernels elsewhere": elsewhere(acts.kernels(3)),
            "4 kernels elsewhere": elsewhere(acts.kernels(4)),
            "6 kernels elsewhere": elsewhere(acts.kernels(6)),
            "8 kernels elsewhere": elsewhere(acts.kernels(8)),
            "10 kernels elsewhere": elsewhere(acts.kernels(10)),
        },
    ),
    "other work after": Condition(
        ONE_STREAM,
        {
            "kernel elsewhere": elsewhere(acts.kernel),
            "new kernel elsewhere": elsewhere(acts.new_kernel("atan_")),
            "memory elsewhere": elsewhere(acts.kernel_in_new_memory),
            "copies elsewhere": elsewhere(acts.copies),
            "driver memory": acts.driver_memory,
            "event waits": acts.event_waits,
            "high priority": acts.high_priority,
            "branches": acts.branches,
        },
    ),
}
"""What makes a fast process slow?"""
REPAIRS = {
    "brief context": Condition(
        TWO_STREAMS,
        {
            "created, destroyed": acts.brief_context,
            "steps elsewhere": elsewhere(warm_up),
            "again": acts.brief_context,
        },
    ),
    "without a context": Condition(
        TWO_STREAMS,
        {
            "driver memory": acts.driver_memory,
            "pinned memory": acts.pinned_memory,
            "new kernel": acts.new_kernel("sigmoid_"),
            "all streams": acts.all_streams,
            "nvidia-smi": acts.nvidia_smi,
            "stack limit": acts.stack_limit,
        },
    ),
}
"""What makes a slow process fast, and does that last?"""
CONDITIONS = {**ORDERS, **GRAPHKIT, **LATER, **REPAIRS}


def measured(name: str, replays: int) -> Iterator[dict[str, object]]:
    """Run a condition in this process.

    Yields:
        For each state: its name ``state``; ``ms``, milliseconds per replay of each graph, and as
        ``host`` those of the acts before it; ``device``, its name; ``nodes`` of each graph.
    """
    condition, graphs = CONDITIONS[name], DecodeGraphs()
    streams = {
        MAIN: torch.cuda.Stream(), POOL: torch.cuda.Stream(), DEFAULT: torch.cuda.default_stream()
    }  # fmt: skip
    then = {state: [(condition.replays, act)] for state, act in condition.then.items()}
    for state, order in {"first": condition.order, **then}.items():
        start = time.perf_counter()
        for stream, act in order:
            with torch.cuda.stream(streams[stream]):
                act(graphs)
            torch.cuda.synchronize()
        host_ms = 1e3 * (time.perf_counter() - start)
        with torch.cuda.stream(streams[condition.replays]):
            ms = {"host": host_ms, **graphs.replay_ms(replays)}
        nodes = {each: graph.num_nodes for each, graph in graphs.graphs.items()}
        device = torch.cuda.get_device_name()
        yield {"state": state, "ms": ms, "device": device, "nodes": nodes}
