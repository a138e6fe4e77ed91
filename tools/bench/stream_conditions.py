"""The conditions under which ``streams.py`` replays graphs.

A condition is a generator. It captures graphs and yields the name of a state; the replays are
measured at each yield. What it does between two yields is what they compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import further_streams
import stream_orders
import torch
from decode_graphs import DecodeGraphs

PER_THREAD_STREAM = 2
"""Handle of the default stream of a thread, ``cudaStreamPerThread``."""


@dataclass(frozen=True)
class Condition:
    """A condition.

    Attributes:
        run: Captures and yields states.
        environment: Variables of the process's environment.
    """

    run: Callable[[DecodeGraphs], Iterator[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


CONDITIONS = {
    "nothing": Condition(further_streams.nothing),
    "further streams": Condition(further_streams.more_streams),
    "default stream first": Condition(stream_orders.default_stream_first),
    "without the default stream": Condition(stream_orders.without_default_stream),
    "created, used, destroyed": Condition(further_streams.used_then_destroyed),
    "blocking stream": Condition(
        further_streams.kernel_on(lambda: further_streams.created(blocking=True))
    ),
    "high priority": Condition(further_streams.kernel_on(lambda: torch.cuda.Stream(priority=-1))),
    "copy to the device": Condition(
        further_streams.copy(further_streams.HOST, further_streams.DEVICE)
    ),
    "copy to the host": Condition(
        further_streams.copy(further_streams.DEVICE, further_streams.HOST)
    ),
    "memset": Condition(further_streams.memset),
    "event waits": Condition(further_streams.event_waits),
    "instantiated after": Condition(stream_orders.instantiated_after),
    "used before the capture": Condition(stream_orders.used_before_capture),
    "replays on the capture stream": Condition(stream_orders.replayed_on_capture_stream),
    "replays on a third stream": Condition(stream_orders.replayed_on_third_stream),
    "graph with branches": Condition(stream_orders.graph_with_branches),
    **{
        f"at most {count} connections": Condition(
            further_streams.more_streams, {"CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
        )
        for count in (1, 2, 8, 32)
    },
    "per-thread default stream": Condition(
        further_streams.kernel_on(lambda: torch.cuda.ExternalStream(PER_THREAD_STREAM))
    ),
    "second context": Condition(further_streams.second_context),
    "second process": Condition(further_streams.second_process),
}
"""Conditions by name, the most important ones first."""


def measure(name: str, replays: int) -> dict[str, object]:
    """Run a condition in this process, and return what it measured.

    Returns:
        ``device``, its name; ``nodes`` of each graph; ``ms`` per replay of each graph, by state.
    """
    graphs = DecodeGraphs()
    ms = {state: graphs.replay_ms(replays) for state in CONDITIONS[name].run(graphs)}
    nodes = {each: graph.num_nodes for each, graph in graphs.graphs.items()}
    return {"device": torch.cuda.get_device_name(), "nodes": nodes, "ms": ms}
