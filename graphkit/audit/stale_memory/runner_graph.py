"""The audit of pool memory that replays of a runner read before they write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch.utils._pytree import tree_leaves

from graphkit.audit.audit_log import AuditLog, NotChecked, row_facts, row_text
from graphkit.audit.bits import checksum
from graphkit.audit.host_objects.reachable_objects import walk_roots
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.node_switches import ReplayGraph, first_node_after
from graphkit.audit.replayable_graph import Effect, ReplayableGraph
from graphkit.audit.row_axes import changed_state
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.stale_memory.pool_memory import (
    Poison,
    PoolMemory,
    Range,
    segment_ranges,
    tensor_range,
)
from graphkit.audit.stale_memory.search import search_stale_memory
from graphkit.graphs import StateSnapshot
from graphkit.graphs.capture_failure import describe_exception
from graphkit.graphs.pool_memory import memory_segments
from graphkit.records import GraphRecord, Node, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import even_owner, first_difference
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget

_MOST = 8
"""Findings per graph."""
_ADVICE = (
    "Write the memory in the forward before it is read, for example with zeros instead of empty, "
    "or allocate and fill it before the capture. Declare memory that the host fills on purpose as "
    "persistent_tensors, and fill them again after a sleep and a wake-up."
)


class RunnerGraph(ReplayableGraph):
    """Replays of a batch at one captured size, compared with a replay on unchanged memory.

    No other batch may run meanwhile. ``start`` also restores ``memory``; the caller restores it
    after the last replay.
    """

    def __init__(
        self,
        target: CaptureTarget,
        runner: Runner[Any, Any],
        batch: Any,
        size: int,
        memory: PoolMemory,
        live: LiveTensors,
        start: StateSnapshot,
    ) -> None:
        graphs = runner.graphs
        self._runner, self._size, self._weights = runner, size, target.weights
        self._batch, self._live, self._start = batch, live, start
        self.memory, self.allocations = memory, graphs[size].allocations
        self.pool_allocations = list(chain.from_iterable(g.allocations for g in graphs.values()))
        declared = chain.from_iterable(
            tensors.values() for tensors in runner.memory_names(target.weights).values()
        )
        outputs = tree_leaves(graphs[size].output)
        kept = (*outputs, *declared, *target.resolved_persistent_tensors().values())
        self.kept = [tensor_range(tensor) for tensor in kept]
        self._expected = EqualStateRuns(runner, batch, size, start).replay()
        self._state = StateSnapshot(restorable_state(runner), runner.device)

    @property
    def record(self) -> GraphRecord:  # type: ignore[override]
        """The nodes. Inspected when they are asked for: most graphs have no finding."""
        return self._runner.inspect(self._size, weights=self._weights)

    def effect(self, poison: Poison) -> Effect | None:
        """Replay after overwriting, and return what differs from a replay without it."""
        runs = self._runs(poison)
        try:
            got = runs.replay()
        except Exception as error:
            return Effect(f"the replay fails: {describe_exception(error)}", {})
        live = self._batch.batch_size
        mismatch = first_difference(self._expected, got, even_owner(live), runs.rounding)
        if mismatch is not None:
            facts = row_facts(mismatch)
            text = f"{row_text(mismatch, live)} is {facts['after']} instead of {facts['before']}"
            return Effect(text, facts)
        changed = changed_state(self._state, self._batch, self._runner.sizes.page_size)
        if not changed:
            return None
        return Effect(f"the state `{changed[0]}` differs", {"field": changed[0]})

    def first_dependent(self, poison: Poison, unit: int) -> Node | None:
        """Return the first node after which memory depends on a unit, by bisection over the nodes.

        Replays the first nodes with the units before it overwritten, and again with the unit as
        well.
        """
        span, graph = poison.unit(unit), self._runner.graphs[self._size]

        def look(run: Callable[[ReplayGraph], object]) -> bool:
            before, after = (
                self.image(poison.first(units), run, span) for units in (unit, unit + 1)
            )
            return before != after

        try:
            return first_node_after(
                graph, self.record.nodes, self._runner.backend.wait_for_device, look
            )
        except NotChecked:
            return None

    def name_at(self, address: int) -> str:
        """Return where a live object holds the memory at an address; empty if none does."""
        return self._live.names([address])[0]

    def image(
        self, poison: Poison, run: Callable[[ReplayGraph], object], ignored: Range
    ) -> list[int]:
        """Return checksums of the memory and the state after another graph of the same step.

        Empty if the replay fails.
        """
        try:
            run(self._runs(poison).replay)
        except Exception:
            return []
        for part in self.memory.parts([ignored]):
            part.zero_()
        blocks = [block.data for block in self.memory.blocks]
        return [checksum(tensor) for tensor in (*blocks, *self._state.tensors.values())]

    def _runs(self, poison: Poison) -> EqualStateRuns:
        prepare = partial(self.memory.overwrite, poison)
        return EqualStateRuns(self._runner, self._batch, self._size, self._start, prepare=prepare)


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
    segments = memory_segments() if runner.device.type == "cuda" else []
    memory = PoolMemory(list(blocks.values()), segment_ranges(segments))
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
