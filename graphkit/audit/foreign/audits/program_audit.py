"""The audit of one process: follows each graph from its capture to its end and checks it.

Checks after a capture and before replays 1 to 8, 16, 32 and so on look at pointers and at numbers.
The first replay and, on request, every n-th is also repeated with poisoned memory, and compared
with what the program has registered. Between checks a replay costs one Python call.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from graphkit.audit.audit_log import Check, NotChecked
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.adapters.transformers import plug_in_if_imported
from graphkit.audit.foreign.audit_options import AuditOptions
from graphkit.audit.foreign.audits.captured_numbers import NumberSearch
from graphkit.audit.foreign.audits.device import CudaDevice, PoolId
from graphkit.audit.foreign.audits.faults import replay_by_node, report_fault
from graphkit.audit.foreign.audits.followed_graph import DEFAULT_POOL, FollowedGraph, held_ranges
from graphkit.audit.foreign.audits.foreign_graph import ForeignGraph
from graphkit.audit.foreign.audits.frozen_numbers import GraphKeys, check_equal_keys, check_numbers
from graphkit.audit.foreign.audits.pointers import Blocks, check_capture, check_references
from graphkit.audit.foreign.audits.process_report import ProcessReport
from graphkit.audit.foreign.audits.rank_keys import RankKeys
from graphkit.audit.foreign.audits.registered_graph import check_dispatch, registered_checks
from graphkit.audit.foreign.audits.static_memory import StaticMemories
from graphkit.audit.foreign.hooks import CaptureObserver
from graphkit.audit.foreign.process_files import AuditFileWriter
from graphkit.audit.foreign.registration import registration_of
from graphkit.audit.launch import log_streams
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.stale_memory.pool_memory import Range
from graphkit.graphs import Attribution
from graphkit.graphs.compiles import Compile, CompileWatch, observed_launches
from graphkit.records import AuditReport
from graphkit.records.audit import NOT_CHECKED, Audit

_OFTEN = 8
"""Replays of a graph that are all checked, because programs change their numbers early."""
Replay = Callable[[Any], object]
"""Replays a ``CUDAGraph``, as its method does without the audit."""


class ProgramAudit:
    """Follows the graphs of this process.

    Args:
        options: What to check.
        writer: Receives the report after each check; ``None`` keeps it in memory.
        current_device: Returns the device of the current thread.

    Attributes:
        results: What was checked and found so far.
    """

    def __init__(
        self,
        options: AuditOptions,
        writer: AuditFileWriter | None = None,
        current_device: Callable[[], Any] = CudaDevice.current,
    ) -> None:
        self._options, self._writer = options, writer
        self.current_device = current_device
        self._compiles = CompileWatch(self._compiled)
        self.forget()

    def forget(self) -> None:
        """Forget all graphs and findings: a forked process has none of its parent's."""
        self._lock = threading.Lock()
        # Also graphs that are gone, until they are half of them.
        self._graphs: list[FollowedGraph] = []
        self._most_graphs = 1
        self._names: Counter[str] = Counter()
        self._memories, self._keys = StaticMemories(), GraphKeys()
        self._rank_keys = RankKeys()
        self._num_captures = 0
        self._fault = False
        self._device: Any = None
        self.results = ProcessReport(self._writer, lambda: self._device or self.current_device())

    # Captures.

    def new_capture(self) -> FollowedCapture:
        """Return the observer of a capture that is about to begin."""
        plug_in_if_imported()
        return FollowedCapture(self)

    def capture_began(self) -> None:
        """Count a capture, during which nothing may wait for the device."""
        self._num_captures += 1

    def capture_ended(self) -> None:
        """Count the end of a capture, also of one that failed."""
        self._num_captures -= 1
        self._compiles.start()

    def follow(
        self,
        graph: Any,
        attribution: Attribution | None,
        captured_at: str,
        active_before: Sequence[tuple[PoolId, Range]],
        search: NumberSearch | None = None,
    ) -> FollowedGraph:
        """Follow a graph that was just captured, and check its pointers."""
        device = self._device = self.current_device()
        self._names[captured_at] += 1
        number = self._names[captured_at]
        name = captured_at or "an unknown line"
        name = name if number == 1 else f"{name} ({number})"
        segments, pool = device.segments(), device.pool_id(graph)
        held = (*active_before, *held_ranges(segments))
        followed = FollowedGraph(
            name=name,
            graph=weakref.ref(graph),
            record=device.inspect(graph, attribution, name),
            pool=pool,
            kept=tuple(sorted({span for its_pool, span in held if its_pool == pool})),
            allocations=tuple(attribution.allocations) if attribution is not None else (),
            generators=tuple(getattr(graph, "_graphkit_generators", ())),
            captured_at=captured_at,
            numbers=search.numbers if search is not None else (),
            calls=search.calls if search is not None else (),
        )
        if len(self._graphs) >= self._most_graphs:
            self._graphs = list(self.graphs)
            self._most_graphs = 2 * len(self._graphs) + 1
        self._graphs.append(followed)
        with self.results.check(Audit.POINTERS, name) as check:
            blocks = Blocks(segments, device.is_mapped)
            check_capture(followed, blocks, LiveTensors(), self._memories, check)
        return followed

    def _compiled(self, found: Compile) -> None:
        """Report a kernel that is compiled after a graph has been replayed, outside of captures."""
        if self._num_captures or not any(followed.replays for followed in self._graphs):
            return
        with suppress(Exception), self.results.check(Audit.WARMUP) as check:
            check.text = "kernels of Triton that were compiled after the first replay"
            check.report(
                FindingKind.LATE_COMPILE,
                f"{found.text} after graphs have been replayed: requests wait for it.",
                kernel=found.kernel,
                source=found.source,
                after=found.shape,
                cause=f"{found.kernel} {found.shape}",
            )

    # Replays.

    def replay(self, followed: FollowedGraph, graph: Any, replay: Replay) -> None:
        """Run a replay of the program, and the checks that are due at it.

        Args:
            followed: The graph; its ``replays`` counts this one.
            graph: The ``CUDAGraph``.
            replay: The replay without the audit. It is called once for the program.
        """
        if not self._lock.acquire(blocking=False):
            replay(graph)
            return
        try:
            self._checked_replay(followed, graph, replay)
        finally:
            self._lock.release()

    def compare_ranks(self, number: int, followed: FollowedGraph) -> None:
        """Compare a replay of this process with those of other ranks, if there are any."""
        if self.current_device().num_ranks() > 1:
            with self.results.check(Audit.MISSES, "ranks") as check:
                self._rank_keys.compare(number, followed, check)

    def _checked_replay(self, followed: FollowedGraph, graph: Any, replay: Replay) -> None:
        number = followed.replays
        device = self._device = self.current_device()
        if self._num_captures or device.is_capturing():
            followed.next_check = number + 1
            if followed.next_poison == number:
                followed.next_poison += 1
            replay(graph)
            return
        finds_fault = self._options.find_fault and not self._fault
        if finds_fault:
            self._note_fault(f"work outside of graphs failed before replay {number}")
        is_poisoned = followed.next_poison == number and not self._options.find_fault
        is_full = is_poisoned or followed.is_checked_next
        blocks = Blocks(device.segments(), device.is_mapped) if is_full else None
        followed.is_checked_next = False
        self._schedule(followed)
        with self.results.check(Audit.POINTERS, followed.name) as check:
            check_references(followed, blocks, check)
        is_changed = self._check_host(followed, graph)
        if self._options.node_by_node == (followed.name, number):
            with self.results.check(Audit.FAULT, followed.name) as check:
                self._fault = replay_by_node(device, followed, graph, lambda: replay(graph), check)
        elif is_poisoned:
            self._poisoned_replay(followed, graph, replay, is_changed)
        else:
            try:
                replay(graph)
            finally:
                if finds_fault:
                    self._note_fault(f"replay {number} failed", followed)

    def _schedule(self, followed: FollowedGraph) -> None:
        number, every = followed.replays, self._options.every
        if followed.next_poison == number:
            followed.next_poison = number + every if every else 0
        usual = number + 1 if number < _OFTEN else 1 << number.bit_length()
        later = [usual, *filter(None, [followed.next_poison])]
        followed.next_check = number + 1 if self._options.find_fault else min(later)

    def _check_host(self, followed: FollowedGraph, graph: Any) -> bool:
        """Check what the host knows of a graph, and return whether a number of it has changed."""
        known = registration_of(graph)
        if known is not None:
            if known.name:
                followed.name = known.name
            with self.results.check(Audit.MISSES, followed.name) as check:
                check_dispatch(known, check)
        with self.results.check(Audit.FROZEN, followed.name) as check:
            if followed.replays == 1:
                check_equal_keys(followed, self.graphs, self._keys, check)
            check_numbers(followed, self.graphs, self._keys, check)
        return any(finding.severity == "error" for finding in check.findings)

    def _poisoned_replay(
        self, followed: FollowedGraph, graph: Any, replay: Replay, is_changed: bool
    ) -> None:
        device, known = self.current_device(), registration_of(graph)
        repeated = ForeignGraph(
            device, followed, graph, lambda: replay(graph), self._options, known
        )

        def is_checked(audit: Audit, run: Callable[[Check], None]) -> bool:
            with self.results.check(audit, followed.name) as check:
                run(check)
            return not check.text.startswith(NOT_CHECKED)

        def refuse_failed(_check: Check) -> None:
            if self._note_fault(f"replay {followed.replays} failed", followed):
                raise NotChecked("the replay failed")

        try:
            is_prepared = is_checked(Audit.POOL_POISON, lambda _check: repeated.prepare())
            replay(graph)
            # ``prepare`` has waited for all earlier work.
            if is_prepared and is_checked(Audit.POOL_POISON, refuse_failed):
                if is_checked(Audit.POOL_POISON, lambda _check: repeated.begin()):
                    for audit, run in registered_checks(repeated):
                        # A graph with another number differs from its body for that reason.
                        if not (is_changed and audit is Audit.SHADOW):
                            is_checked(audit, run)
                    is_checked(Audit.POOL_POISON, repeated.search)
                is_checked(Audit.POOL_POISON, repeated.restore)
        finally:
            with suppress(Exception):
                repeated.close()
        if followed.replays == 1:
            log_streams(device.num_streams(), self.results)

    def _note_fault(self, text: str, followed: FollowedGraph | None = None) -> bool:
        """Return whether CUDA failed, and report the first failure."""
        error = self._device.fault()
        if error and not self._fault:
            self._fault = True
            with self.results.check(Audit.FAULT, followed.name if followed else "") as check:
                report_fault(text, error, check)
            if followed is not None and self._writer is not None:
                self._writer.write_fault(followed.name, followed.replays)
        return bool(error)

    # Requests.

    def check_next_replays(self) -> None:
        """Check the pointers of every graph before its next replay."""
        for followed in self._graphs:
            followed.is_checked_next = True
            followed.next_check = min(followed.next_check, followed.replays + 1)

    def check_now(self) -> AuditReport:
        """Check the pointers of every live graph, and return the report of this process."""
        device = self.current_device()
        with self._lock:
            blocks = Blocks(device.segments(), device.is_mapped)
            for followed in self.graphs:
                with self.results.check(Audit.POINTERS, followed.name) as check:
                    check_references(followed, blocks, check)
        return self.results.current()

    @property
    def graphs(self) -> Sequence[FollowedGraph]:
        """The graphs that the program still has."""
        return [followed for followed in self._graphs if followed.is_alive]

    def end(self) -> None:
        """Report a fault that no replay was found for, and write the report."""
        if any(followed.replays for followed in self._graphs):
            self._note_fault("a replay or other work failed, it is not known which")
        self.results.end()


class FollowedCapture(CaptureObserver):
    """Hands a finished graph to the audit."""

    def __init__(self, program: ProgramAudit) -> None:
        super().__init__()
        self._program = program
        self._active: list[tuple[PoolId, Range]] = []
        self.search: NumberSearch | None = None
        self._launches = ExitStack()

    def before_begin(self) -> None:
        """Note also the memory that is in use."""
        self.search = NumberSearch()
        self.observe = self.search.note
        super().before_begin()
        held = held_ranges(self._program.current_device().segments())
        self._active = [(pool, span) for pool, span in held if pool != DEFAULT_POOL]

    def after_begin(self) -> None:
        """Let nothing wait for the device meanwhile, and observe launches of Triton kernels."""
        self._program.capture_began()
        super().after_begin()
        self._launches.enter_context(observed_launches(self._note_launch))

    def before_end(self) -> None:
        """Allow checks again."""
        self._launches.close()
        self._program.capture_ended()
        super().before_end()

    def _note_launch(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        its = self.attribution
        if self.search is not None and its is not None and its.applies_here():
            its.add_new_nodes()
            self.search.note_launch(kernel, arguments, len(its.origins))

    def after_end(self, graph: Any) -> None:
        """Follow the graph."""
        graph._graphkit_followed = self._program.follow(
            graph, self.attribution, self.captured_at, self._active, self.search
        )
