"""The conditions under which ``streams.py`` replays graphs.

An order is what a process does before its first replay: pairs of a stream and an act. All replays
run on the stream ``MAIN``. ``ONE_STREAM`` and ``TWO_STREAMS`` are known to differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import context_acts as contexts
import stream_acts as acts
import torch
from decode_graphs import DecodeGraphs
from stream_acts import Act, allocate, capture, elsewhere, launch, warm_up

MAIN, POOL, DEFAULT = "main", "pool", "default"
"""Streams: two of torch's pool, and the default stream."""
Order = Sequence[tuple[str, Act]]
ONE_STREAM: Order = ((MAIN, allocate), (MAIN, warm_up), (MAIN, capture))
"""A fast order."""
TWO_STREAMS: Order = ((DEFAULT, allocate), (MAIN, warm_up), (MAIN, capture))
"""A slow order. It is the usual one: steps warm up on the stream that captures them."""
WORK_ELSEWHERE: Mapping[str, Act] = {
    "memory elsewhere": elsewhere(acts.kernel_in_new_memory),
    "new kernel elsewhere": elsewhere(acts.new_kernel("atan_")),
    "steps elsewhere": elsewhere(warm_up),
    "captured again": capture,
}
"""What a process may do after its first replay."""


@dataclass(frozen=True)
class Condition:
    """A condition.

    Attributes:
        order: What happens before the first replay.
        then: What happens between replays, by the name of the state that follows.
        environment: Variables of the process's environment.
    """

    order: Order
    then: Mapping[str, Act] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def kernel_before(act: Act) -> Order:
    """Return ``ONE_STREAM`` with a kernel on the default stream before an act."""
    position = [each for _, each in ONE_STREAM].index(act)
    return (*ONE_STREAM[:position], (DEFAULT, acts.kernel), *ONE_STREAM[position:])


_context, _green = contexts.SecondContext(), contexts.GreenContext()
ORDERS = {
    "one stream": Condition(ONE_STREAM),
    "two streams": Condition(TWO_STREAMS),
    "two streams of the pool": Condition(((POOL, allocate), *TWO_STREAMS[1:])),
    "kernel before the warm-up": Condition(kernel_before(warm_up)),
    "kernel before the capture": Condition(kernel_before(capture)),
    "kernel before the first replay": Condition((*ONE_STREAM, (DEFAULT, acts.kernel))),
    "warm-up on both streams": Condition((TWO_STREAMS[0], (DEFAULT, warm_up), *TWO_STREAMS[1:])),
    "small graph before": Condition(((MAIN, acts.replay_small_graph), *TWO_STREAMS)),
    "captured on another stream": Condition((*ONE_STREAM[:2], (POOL, capture), (POOL, launch))),
}
"""What determines the state of a process?"""
REPAIRS = {
    "second context": Condition(
        TWO_STREAMS,
        {
            "created": _context.create,
            "filled": _context.fill,
            "destroyed": _context.destroy,
            **WORK_ELSEWHERE,
        },
    ),
    "brief context": Condition(TWO_STREAMS, {"created, destroyed": contexts.brief_context}),
    "context before the capture": Condition(
        (*TWO_STREAMS[:2], (MAIN, contexts.brief_filled_context), *TWO_STREAMS[2:]),
        WORK_ELSEWHERE,
    ),
    "green context": Condition(
        TWO_STREAMS,
        {"created": _green.create, "used": _green.use, "destroyed": _green.destroy},
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
LATER = {
    "memory after": Condition(
        ONE_STREAM,
        {
            "kernel elsewhere": elsewhere(acts.kernel),
            "driver memory": acts.driver_memory,
            "memory elsewhere": elsewhere(acts.kernel_in_new_memory),
        },
    ),
    "new kernels after": Condition(
        ONE_STREAM,
        {
            "kernel elsewhere": elsewhere(acts.kernel),
            "new kernel": acts.new_kernel("sigmoid_"),
            "new kernel elsewhere": elsewhere(acts.new_kernel("atan_")),
        },
    ),
    "steps after": Condition(
        ONE_STREAM, {"steps elsewhere": elsewhere(warm_up), "captured again": capture}
    ),
    "other work after": Condition(
        ONE_STREAM,
        {
            "event waits": acts.event_waits,
            "high priority": acts.high_priority,
            "pinned memory": acts.pinned_memory,
            "copies elsewhere": elsewhere(acts.copies),
            "branches": acts.branches,
        },
    ),
    "torch.cuda.graph": Condition(
        (*ONE_STREAM[:2], (MAIN, acts.capture_with_torch)), WORK_ELSEWHERE
    ),
}
"""What makes a fast process slow?"""
CONDITIONS = {
    **ORDERS,
    **REPAIRS,
    **LATER,
    "modules loaded at once": Condition(TWO_STREAMS, {}, {"CUDA_MODULE_LOADING": "EAGER"}),
}


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
    then: dict[str, Order] = {state: [(MAIN, act)] for state, act in condition.then.items()}
    for state, order in {"first": condition.order, **then}.items():
        start = time.perf_counter()
        for stream, act in order:
            with torch.cuda.stream(streams[stream]):
                act(graphs)
            torch.cuda.synchronize()
        host_ms = 1e3 * (time.perf_counter() - start)
        with torch.cuda.stream(streams[MAIN]):
            ms = {"host": host_ms, **graphs.replay_ms(replays)}
        nodes = {each: graph.num_nodes for each, graph in graphs.graphs.items()}
        device = torch.cuda.get_device_name()
        yield {"state": state, "ms": ms, "device": device, "nodes": nodes}
