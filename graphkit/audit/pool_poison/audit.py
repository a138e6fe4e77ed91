"""Search for memory of the graph pool that a replay reads before it writes it.

Between replays such memory keeps what an earlier replay or the host left in it, so that replays
are right until something else is there: after a sleep and a wake-up, a weight update, or a replay
of another graph. The audit overwrites the pool between two replays of a batch. If their results
differ, it searches for the bytes and for the node that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.host_objects.reachable_objects import walk_roots
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.places import row_facts
from graphkit.audit.pool_poison.effects import PoisonedReplays
from graphkit.audit.pool_poison.findings import report_stale_read
from graphkit.audit.pool_poison.memory import PoolMemory
from graphkit.audit.pool_poison.ranges import (
    FILLS,
    Poison,
    Range,
    ranges_to_fill,
    tensor_range,
    unset_allocation,
    without,
)
from graphkit.audit.pool_poison.stale_reads import StaleRead, first_stale_read
from graphkit.graphs import Allocation, StateSnapshot
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.drawn_state import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget

_MOST = 8
"""Findings per graph."""
_ADVICE = (
    "Write the memory in the forward before it is read, for example with zeros instead of empty, "
    "or allocate and fill it before the capture. Declare memory that the host fills on purpose as "
    "persistent_tensors, and fill them again after a sleep and a wake-up."
)


def audit_pool_poison(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
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
            replays = PoisonedReplays(runner, batch, size, memory, start)
            _Search(target, replays, live, check).run()


class _Search:
    """The search for stale memory at one captured size."""

    def __init__(
        self, target: CaptureTarget, replays: PoisonedReplays, live: LiveTensors, check: Check
    ) -> None:
        self._replays, self._live, self._check = replays, live, check
        self._weights = target.weights
        runner, graphs = replays.runner, replays.runner.graphs
        self._own = graphs[replays.size].allocations
        self._all = [allocation for graph in graphs.values() for allocation in graph.allocations]
        declared = chain.from_iterable(
            tensors.values() for tensors in runner.memory_names(target.weights).values()
        )
        outputs = tree_leaves(graphs[replays.size].output)
        kept = (*outputs, *declared, *target.resolved_persistent_tensors().values())
        self._kept = [tensor_range(tensor) for tensor in kept]

    def run(self) -> None:
        """Report every read of stale memory that is found."""
        tested, replays, runner = 0, self._replays, self._replays.runner
        for fill in FILLS:
            blocks = replays.memory.blocks
            poison = Poison(fill, ranges_to_fill(fill, blocks, self._kept, self._own, self._all))
            tested = max(tested, sum(end - begin for begin, end in poison.ranges))
            while len(self._check.findings) < _MOST and replays.effect(poison) is not None:
                nodes = runner.inspect(replays.size, weights=self._weights).nodes
                read = first_stale_read(replays, nodes, poison)
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
        is_live = self._replays.memory.block_at(address).is_live
        name = self._live.names([address])[0] if is_live else ""
        allocation = _allocation_at(address, is_live, self._own, self._all)
        effect = read.effect
        report_stale_read(
            self._check,
            read.node,
            read.argument,
            allocation,
            f"With {read.fill.text} there, {effect.text}",
            name=name,
            field=effect.field,
            advice=_ADVICE,
            **({} if effect.mismatch is None else row_facts(effect.mismatch)),
        )
        return read.unit if allocation is None else (allocation.begin, allocation.end)


def _allocation_at(
    address: int, is_live: bool, own: Sequence[Allocation], others: Sequence[Allocation]
) -> Allocation | None:
    """Return what allocated memory that a replay reads before it writes it, if it is known.

    Args:
        address: An address in the memory.
        is_live: Whether a tensor holds the memory, which was then allocated last.
        own: Allocations of the captures of the graph that reads.
        others: Allocations of all graphs, in the order of their captures.
    """
    if not is_live:
        return unset_allocation(address, own)
    found = (
        allocation
        for allocation in reversed(others)
        if allocation.begin <= address < allocation.end
    )
    return next(found, None)


def _device_segments(device: torch.device) -> list[Range]:
    """Return the ranges of device memory that torch has allocated; none on the CPU."""
    if device.type != "cuda":
        return []
    segments = torch.cuda.memory_snapshot()
    return [
        (segment["address"], segment["address"] + segment["total_size"]) for segment in segments
    ]
