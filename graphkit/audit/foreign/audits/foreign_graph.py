"""A graph of another program as a ``ReplayableGraph``: repetitions of one of its replays.

The program's own replay runs once, as it would without the check. Then the replay is repeated from
one state with different contents of the pool's scratch memory: what the replay before left there,
zeros, and other numbers where captures allocated floating-point numbers. If any memory outside of
the scratch differs afterwards, the replay reads memory that it has not written. At the end all
memory and all random numbers are as the program's own replay left them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from graphkit.audit.audit_log import Check, NotChecked
from graphkit.audit.bits import CHUNK
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audit_options import AuditOptions
from graphkit.audit.foreign.audits.checked_memory import checked_memory, mib
from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
from graphkit.audit.foreign.audits.rank_keys import has_collective
from graphkit.audit.foreign.audits.watched_memory import DeclaredMemory, ReplayMemory
from graphkit.audit.foreign.registration import Registration
from graphkit.audit.launch import REPETITIONS, report_launch
from graphkit.audit.replayable_graph import Effect, ReplayableGraph
from graphkit.audit.stale_memory.pool_memory import Poison, PoolMemory
from graphkit.audit.stale_memory.search import search_stale_memory
from graphkit.graphs import PoolBlock
from graphkit.records import GraphRecord, count_of
from graphkit.runners.comparison.differences import Tensors

_MOST = 3
"""Findings per check."""
_REPLAYS = 6
"""Replays of a check without a finding: three contents, a repetition, and two for their timing."""
_REPEATABLE = (
    "kernel", "memcpy", "memset", "child graph", "conditional", "empty", "event record",
    "event wait", "op",
)  # fmt: skip
"""Kinds of nodes that may run more often than the program asked for."""
_UNEQUAL = "repeated replays from the same state differ"


def refusal(record: GraphRecord, num_ranks: int) -> str:
    """Return the reason why the replays of a graph cannot be repeated, or an empty string."""
    if num_ranks > 1:
        return f"a repeated replay may wait for the other {num_ranks - 1} ranks"
    for node in record.nodes:
        if node.kind not in _REPEATABLE:
            return f"node {node.index} is a {node.kind}, which must not run more often"
        if has_collective(node.name):
            return f"node {node.index}, {node.short_name}, may wait for other processes"
    return ""


class ForeignGraph(ReplayableGraph):
    """A graph at one replay of the program.

    Call ``prepare`` before the program's replay, ``begin`` after it, and ``restore`` at last, which
    restores memory and random numbers.
    """

    def __init__(
        self,
        device: Any,
        followed: FollowedGraph,
        graph: Any,
        repeat: Callable[[], object],
        options: AuditOptions,
        known: Registration | None = None,
    ) -> None:
        self._device, self._graph, self._repeat = device, graph, repeat
        self._options, self._exits = options, ExitStack()
        self.followed, self.known = followed, known
        self.record, self.allocations, self.kept = followed.record, followed.allocations, []

    def prepare(self) -> None:
        """Take checksums and copies, before the program's replay.

        Raises:
            NotChecked: The replay cannot be repeated, or the check would take too much memory.
        """
        device, followed = self._device, self.followed
        reason = refusal(followed.record, device.num_ranks())
        if reason:
            raise NotChecked(reason)
        device.synchronize()
        self.deadline = time.perf_counter() + self._options.seconds
        self._exits.enter_context(device.own_memory())
        limit = min(self._options.megabytes << 20, device.free_bytes() // 2)
        self._memory: ReplayMemory
        if self.known is not None and self.known.state is not None:
            self._memory, self._checked = DeclaredMemory(self.known), None
        else:
            self._checked = checked_memory(device, followed, limit)
            self._memory = self._checked.watched
        self._before_random = device.random_states(followed.generators)

    def begin(self) -> None:
        """Note what the program's replay has written.

        Raises:
            NotChecked: It wrote more than may be copied.
        """
        device, checked = self._device, self._checked
        device.synchronize()
        self._after_random = device.random_states(self.followed.generators)
        if checked is None:
            self._memory.note_replay(self._options.megabytes << 20)
            self.memory = PoolMemory([], ())
            return
        limit = checked.room // 4  # copies of the state after it, and what repetitions write
        written = self._memory.note_replay(limit)
        if written > limit:
            raise NotChecked(f"it writes {mib(written)}, too much to copy and restore")
        scratch = [PoolBlock(device.device_bytes(*span), is_live=False) for span in checked.scratch]
        self.memory = PoolMemory(scratch, checked.mapped if scratch else ())

    def close(self) -> None:
        """Free the copies."""
        for name in ("_memory", "_checked", "_baseline", "memory"):
            self.__dict__.pop(name, None)
        self._exits.close()

    def search(self, check: Check) -> None:
        """Repeat the replay, report what depends on stale memory, and measure the launch.

        Raises:
            NotChecked: Repetitions differ, or take too long.
        """
        began, limit = time.perf_counter(), self._options.seconds
        self._replay(None)
        self._baseline = self._memory.contents()
        self._replay(None)
        self._replay_seconds = (time.perf_counter() - began) / 2
        if self._memory.first_difference(self._baseline) is not None:
            raise NotChecked(_UNEQUAL)
        if self._replay_seconds * _REPLAYS > limit:
            raise NotChecked(
                f"a replay takes {self._replay_seconds:.2f} s, and {_REPLAYS} of them more than "
                f"the {limit:g} s of a check"
            )
        if self._checked is None:
            raise NotChecked("its program declares the rows that it writes, and no other memory")
        tested = search_stale_memory(self, check, _MOST, FindingKind.STALE_POOL_MEMORY.advice)
        if tested is None:
            raise NotChecked(_UNEQUAL)
        check.text = (
            f"overwrote {count_of(tested, 'byte')} of scratch memory between replays; compared "
            f"{mib(len(self._memory.written) * CHUNK)} that the graph writes"
        )
        self._measure_launch(check)

    def effect(self, poison: Poison) -> Effect | None:
        """Replay on overwritten memory, and return the first memory that differs."""
        self._replay(poison)
        address = self._memory.first_difference(self._baseline)
        if address is None:
            return None
        changed = self._written_at(address)
        text = f"{changed} differs from a replay after another replay"
        return Effect(text, {"field": changed.strip("`")})

    def rewind(self) -> None:
        """Restore memory and random numbers to those before the program's replay."""
        self._memory.rewind()
        self.memory.restore()
        self._device.set_random_states(self._before_random, self.followed.generators)

    def replay(self) -> None:
        """Replay the graph on memory as it is, and wait."""
        self._repeat()
        self._device.synchronize()

    def state(self) -> Tensors:
        """Return copies of the state that the program has declared, with the rows first."""
        return self._memory.state() if isinstance(self._memory, DeclaredMemory) else {}

    def _replay(self, poison: Poison | None) -> None:
        self.rewind()
        if poison is not None:
            self.memory.overwrite(poison)
        self.replay()

    def _written_at(self, address: int) -> str:
        """Return what memory an address is in, for a sentence."""
        for memory in self.followed.memories.values():
            if memory.begin <= address < memory.end:
                return f"`{memory.name}`"
        if any(begin <= address < end for begin, end in self.followed.kept):
            return "an output of the graph"
        return "memory that the graph writes"

    def _measure_launch(self, check: Check) -> None:
        """Measure the launch, once per graph, while the state may change."""
        followed = self.followed
        needed = REPETITIONS * self._replay_seconds
        left = self.deadline - time.perf_counter()
        if followed.replays > 1 or not followed.record.nodes or needed > left:
            return

        def prepare() -> None:
            self._memory.rewind()
            self._device.set_random_states(self._before_random, followed.generators)

        report_launch(followed.record, self._device.launch_us(self._graph, prepare), check)

    def restore(self, check: Check) -> None:
        """Restore memory and random numbers to those after the program's replay."""
        if not hasattr(self, "memory"):
            return
        self._memory.restore()
        self.memory.restore()
        self._device.set_random_states(self._after_random, self.followed.generators)
        self._device.synchronize()
        changed = len(self._memory.changed())
        if changed:
            check.report(
                FindingKind.STATE_NOT_RESTORED,
                f"{mib(changed * CHUNK)} of memory differ after the check: repeated replays wrote "
                "memory that the program's replay did not write. Results of the program may differ "
                "from a run without the audit.",
            )
