"""Records of captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphkit.errors import InspectError, short_repr
from graphkit.graphs.attribution import Attribution
from graphkit.graphs.devices import environment
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.graphs.source_lines import named_tensors
from graphkit.graphs.walk.cuda_walk import CudaWalk
from graphkit.graphs.walk.memory_map import NamedTensors
from graphkit.graphs.walk.recorder_walk import RecorderWalk
from graphkit.graphs.walk.timing import with_times
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
    """Describe a captured graph: its nodes, edges, arguments, memory and, on request, its times.

    The graph is neither changed nor, without ``replay``, run. On CUDA reads the template with the
    driver's ``cuGraphGetNodes``, ``cuGraphGetEdges`` and ``cuGraphKernelNodeGetParams``, about 10
    us per node, and the allocator with ``torch.cuda.memory_snapshot``.

    Args:
        graph: A captured ``torch.cuda.CUDAGraph(keep_graph=True)``, or a ``CapturedGraph``. Must
            not be closed or reset.
        names: Names for the memory that arguments point to: a model, or tensors by kind of memory
            and name, such as ``{"weight": dict(model.named_parameters()), "input": {"ids": ids}}``.
            The kinds are those of ``graphkit.records.Pointer``.
        attribution: The ``Attribution`` of the capture, if the graph is not a runner's.
        name: Name of the record.
        captured_at: Line that captured the graph, for the record.
        replay: Replays the graph once. If given, it is called 11 times without and 21 times with
            torch's profiler (3 times each on the recorder), and the record has times in
            microseconds.

    Returns:
        A record that holds no tensors and outlives the graph. Pointers are addresses of this
        process.

    Raises:
        InspectError: The graph's template was not kept, nothing was captured, the graph was closed,
            or cuda-bindings are not installed; or an argument has a wrong type.
    """
    _check_arguments(names, attribution, replay)
    origins = attribution.origins if attribution is not None else getattr(graph, "origins", ())
    names = {"weight": named_tensors(names)} if isinstance(names, nn.Module) else names or {}
    walk_type = RecorderWalk if isinstance(graph, RecordedGraph) else CudaWalk
    walk = walk_type(graph, origins, names)
    unprofiled_us = walk.unprofiled_us(replay) if replay else None  # a profiler slows down launches
    launches = walk.launches(replay) if replay else ()
    nodes, timing = with_times(walk.nodes, walk.edges, launches)
    return GraphRecord(
        name=name,
        backend=walk.backend,
        environment=environment(walk.device),
        captured_at=captured_at,
        nodes=nodes,
        edges=walk.edges,
        timing=timing and replace(timing, unprofiled_us=unprofiled_us),
        memory=walk.memory,
    )


def _check_arguments(names: object, attribution: object, replay: object) -> None:
    if names is not None and not isinstance(names, (nn.Module, Mapping)):
        raise InspectError(
            f"names must be a module or tensors by kind and name, got {short_repr(names)}."
        )
    for kind, tensors in names.items() if isinstance(names, Mapping) else ():
        is_named = isinstance(tensors, Mapping)
        if not is_named or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
            raise InspectError(
                f"names[{kind!r}] must be tensors by name, got {short_repr(tensors)}."
            )
    if attribution is not None and not isinstance(attribution, Attribution):
        raise InspectError(
            f"attribution must be the capture's Attribution, got {short_repr(attribution)}."
        )
    if replay is not None and not callable(replay):
        raise InspectError(
            f"replay must be a function that replays the graph, got {short_repr(replay)}."
        )
