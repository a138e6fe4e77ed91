"""The audit of pool memory that replays of a runner read before they write it."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.host_objects.reachable_objects import walk_roots
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.stale_memory.pool_memory import PoolMemory
from graphkit.audit.stale_memory.ranges import Range
from graphkit.audit.stale_memory.runner_graph import RunnerGraph
from graphkit.audit.stale_memory.search import search_stale_memory
from graphkit.graphs import StateSnapshot
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget

_MOST = 8
"""Findings per graph."""
_ADVICE = (
    "Write the memory in the forward before it is read, for example with zeros instead of empty, "
    "or allocate and fill it before the capture. Declare memory that the host fills on purpose as "
    "persistent_tensors, and fill them again after a sleep and a wake-up."
)


def audit_stale_memory(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pool memory that replays of sample batches read before they write it.

    Leaves out the outputs, the memory that the target declares, and words that hold addresses.
    Restores the pool, declared state and random numbers, also after an error. Needs memory for a
    copy of the pool and two of the declared state. Integers that hold zeros are overwritten with
    zeros only, so that stale ones among them are not found.

    Args:
        target: Draws the batches, and declares weights, state and ``persistent_tensors``.
        runner: A runner of the target, captured with attribution; without it, memory that holds
            zeros is not tested. No graph of its backend may be replayed meanwhile.
        log: Collects the findings, at most eight per size.

    Raises:
        TargetError: ``persistent_tensors`` has something other than tensors.
    """
    runner.backend.wait_for_replays()
    blocks = {
        block.begin: block for graph in runner.graphs.values() for block in graph.pool_memory()
    }
    memory = PoolMemory(list(blocks.values()), _device_segments(runner.device))
    live = LiveTensors(
        walk_roots(target.forwards[runner.mode]), ignored=[block.data for block in memory.blocks]
    )
    for size in runner.table:
        with (
            log.check(Audit.POOL_POISON, runner.mode.name, size) as check,
            StateSnapshot(restorable_state(runner), runner.device, memory.restore) as start,
        ):
            batch = target.batch(runner.mode, min(size, runner.table.max_batch_size), SEED)
            graph = RunnerGraph(target, runner, batch, size, memory, live, start)
            tested = search_stale_memory(graph, check, _MOST, _ADVICE)
            if tested is None:
                check.text = (
                    "not judged: replays of the same batch differ, although memory is equal"
                )
            elif tested:
                check.text = (
                    f"overwrote {count_of(tested, 'byte')} of the graph pool between replays"
                )
            else:
                check.text = "the graph pool has no memory besides outputs and declared tensors"


def _device_segments(device: torch.device) -> list[Range]:
    """Return the ranges of device memory that torch has allocated; none on the CPU."""
    if device.type != "cuda":
        return []
    segments = torch.cuda.memory_snapshot()
    return [
        (segment["address"], segment["address"] + segment["total_size"]) for segment in segments
    ]
