"""A captured graph, ours or anybody's, as a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphkit.graphs.attribution import Attribution
from graphkit.graphs.backend import GraphSequence
from graphkit.graphs.environment import environment
from graphkit.graphs.recorder import RecordedGraph
from graphkit.graphs.walk.cuda_walk import CudaWalk
from graphkit.graphs.walk.memory_map import NamedTensors
from graphkit.graphs.walk.recorder_walk import RecorderWalk
from graphkit.graphs.walk.timing import timed
from graphkit.records import GraphRecord


def inspect_graph(
    graph: Any,
    *,
    names: nn.Module | NamedTensors | None = None,
    attribution: Attribution | None = None,
    name: str = "",
    captured_at: str = "",
    replay: Callable[[], object] | None = None,
) -> GraphRecord:
    """Read what is inside a captured graph.

    Changes nothing, and runs nothing unless ``replay`` is given. About ten microseconds per node,
    and a look at the allocator.

    Args:
        graph: A ``torch.cuda.CUDAGraph`` that was made with ``keep_graph=True`` and captured, by
            whomever, or a graph of a runner.
        names: The model, or tensors by kind of memory and name, such as
            ``{"weight": dict(model.named_parameters()), "input": {"ids": ids}}``: what arguments
            point to is then called so.
        attribution: What was on during the capture, if the graph is not a runner's.
        name: For the record.
        captured_at: The line that captured it, for the record.
        replay: Launches the graph once; given, some replays are measured.

    Raises:
        InspectError: The graph's template was not kept, nothing was captured, it was closed, or
            cuda-bindings are missing.
    """
    parts: Sequence[Any] = graph.graphs if isinstance(graph, GraphSequence) else (graph,)
    origins = attribution.origins if attribution is not None else getattr(graph, "origins", ())
    names = {"weight": tensors_of(names)} if isinstance(names, nn.Module) else names or {}
    walk = RecorderWalk if isinstance(parts[0], RecordedGraph) else CudaWalk
    inside = walk(parts, origins, names)
    launches = inside.launches(replay) if replay else ()
    nodes, timing = timed(inside.nodes, inside.edges, launches)
    return GraphRecord(
        name=name,
        backend=inside.backend,
        environment=environment(inside.device),
        captured_at=captured_at,
        nodes=nodes,
        edges=inside.edges,
        timing=timing,
        memory=inside.memory,
    )


def tensors_of(
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by path; a mapping as it is."""
    if isinstance(weights, nn.Module):
        return dict([*weights.named_parameters(), *weights.named_buffers()])
    return dict(weights or {})
