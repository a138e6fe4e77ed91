"""Search for memory of the graph pool that a replay reads before it writes it.

Between replays such memory keeps what an earlier replay or the host left in it, so that replays
are right until something else is there: after a sleep and a wake-up, a weight update, or a replay
of another graph. The audit overwrites the pool between two replays of a batch. If their results
differ, it searches for the bytes and for the node that reads them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.pool_poison.findings import allocation_at, report_stale_read
from graphkit.audit.pool_poison.memory import PoolMemory
from graphkit.audit.pool_poison.ranges import (
    FILLS,
    Poison,
    Range,
    range_of,
    ranges_to_fill,
    without,
)
from graphkit.audit.pool_poison.stale_reads import StaleRead, first_stale_read
from graphkit.audit.pool_poison.trials import PoisonTrials
from graphkit.graphs import StateSnapshot
from graphkit.records import count_of
from graphkit.runners import Runner
from graphkit.runners.reachable_objects import walk_roots
from graphkit.targets import CaptureTarget
from graphkit.verify.comparison import restorable_state

_SEED = 70
_MOST = 8
"""Findings per graph."""


def audit_pool_poison(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report pool memory that replays of sample batches read before they write it.

    Leaves out the outputs, the memory that the target declares, and words that hold addresses.
    Restores the pool, declared state and random numbers, also after an error. Needs memory for a
    copy of the pool and two of the declared state. Integers that hold zeros are overwritten with
    zeros only, so that stale ones among them are not found.

    Args:
        target: Draws the batches, and declares weights, state and ``kept_memory``.
        runner: A runner of the target, captured with attribution; without it, memory that holds
            zeros is not tested. No graph of its backend may be replayed meanwhile.
        log: Collects the findings, at most eight per size.

    Raises:
        TargetError: ``kept_memory`` has something other than tensors.
    """
    runner.backend.wait_for_replays()
    blocks = {
        block.begin: block for graph in runner.graphs.values() for block in graph.pool_memory()
    }
    memory = PoolMemory(list(blocks.values()), _device_segments(runner.device))
    live = LiveTensors(
        walk_roots(target.forwards[runner.mode]), ignored=[block.data for block in memory.blocks]
    )
    with memory.preserved():
        for size in runner.table:
            with (
                log.check("pool-poison", runner.mode.name, size) as check,
                StateSnapshot(restorable_state(runner), runner.device) as start,
            ):
                batch = target.batch(runner.mode, min(size, runner.table.max_batch_size), _SEED)
                trials = PoisonTrials(runner, batch, size, memory, start)
                _Search(target, trials, live, check).run()


class _Search:
    """The search for stale memory at one captured size."""

    def __init__(
        self, target: CaptureTarget, trials: PoisonTrials, live: LiveTensors, check: Check
    ) -> None:
        self._trials, self._live, self._check = trials, live, check
        self._weights = target.weights
        runner, graphs = trials.runner, trials.runner.graphs
        self._own = graphs[trials.size].allocations
        self._all = [each for graph in graphs.values() for each in graph.allocations]
        declared = chain.from_iterable(
            tensors.values() for tensors in runner.memory_names(target.weights).values()
        )
        outputs = tree_leaves(graphs[trials.size].output)
        kept = (*outputs, *declared, *target.kept_tensors().values())
        self._kept = [range_of(tensor) for tensor in kept]

    def run(self) -> None:
        """Report every read of stale memory that is found."""
        tested, trials, runner = 0, self._trials, self._trials.runner
        for fill in FILLS:
            blocks = trials.memory.blocks
            poison = Poison(fill, ranges_to_fill(fill, blocks, self._kept, self._own, self._all))
            tested = max(tested, sum(end - begin for begin, end in poison.ranges))
            while len(self._check.findings) < _MOST and trials.effect(poison) is not None:
                nodes = runner.inspect(trials.size, weights=self._weights).nodes
                read = first_stale_read(trials, nodes, poison)
                if read is None:
                    self._check.text = (
                        "not judged: replays of the same batch differ, although memory is equal"
                    )
                    return
                self._kept.append(self._report(read))
                poison = Poison(fill, tuple(without(poison.ranges, self._kept)))
        self._check.text = (
            f"overwrote {count_of(tested, 'byte')} of the graph pool between replays"
            if tested
            else "the graph pool has no memory besides outputs and declared tensors"
        )

    def _report(self, read: StaleRead) -> Range:
        """Report a read, and return the range of the memory that it reads from."""
        address = read.unit[0]
        is_live = self._trials.memory.block_of(address).is_live
        name = self._live.name(address) if is_live else ""
        allocation = allocation_at(address, is_live, self._own, self._all)
        report_stale_read(self._check, read, name, allocation)
        return read.unit if allocation is None else (allocation.begin, allocation.end)


def _device_segments(device: torch.device) -> list[Range]:
    """Return the ranges of device memory that torch has allocated; none on the CPU."""
    if device.type != "cuda":
        return []
    segments = torch.cuda.memory_snapshot()
    return [(each["address"], each["address"] + each["total_size"]) for each in segments]
