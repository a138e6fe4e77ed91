"""Replay of captured graphs for live batches: everything that happens per replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphkit.buffers import ENTRIES, Axis, BatchWriter, InputBuffers
from graphkit.errors import InputError
from graphkit.graphs import Backend, CapturedGraph, SizeTable
from graphkit.records import ReplayStats
from graphkit.runners.capture_checks import FrozenValues
from graphkit.runners.dispatch import Dispatch, require_count, size_error
from graphkit.runners.outputs import Output
from graphkit.runners.step import Step

if TYPE_CHECKING:
    from graphkit.runners.replay_consensus import ReplayConsensus

OutputT = TypeVar("OutputT", bound=Output)


class ReplayPlan:
    """A live batch size at a captured size, made at the first replay of both.

    Further replays look nothing up and allocate nothing.

    Attributes:
        requests: Number of live requests.
        tokens: Number of live rows; the largest number if the batch is ragged.
        has_rows: 1, or 0 for an idle batch, whose fields without axis are pads, too.
        padded_batch_size: Captured size.
        launch: Replays the captured graph.
        output: Returns a new output of the graph's live rows. Its caller may change it.
        replays: Number of replays.
        missing_rows: Sum over all replays of the rows that they had fewer than ``tokens``.
        staged: Attributes of staged batches of this size, by entry; ``None`` until one was staged.
        writer: ``writer(entry)`` returns the writer of such a batch into a mailbox entry.
    """

    __slots__ = (
        "has_rows",
        "launch",
        "missing_rows",
        "output",
        "padded_batch_size",
        "replays",
        "requests",
        "staged",
        "tokens",
        "writer",
    )  # fmt: skip

    def __init__(
        self,
        buffers: InputBuffers,
        requests: int,
        padded_batch_size: int,
        graph: CapturedGraph,
        output: Output,
    ) -> None:
        self.requests, self.has_rows = requests, min(requests, 1)
        self.tokens = buffers.capacity.rows(Axis.TOKEN, requests)
        self.padded_batch_size = padded_batch_size
        self.launch = graph.replay
        rows = output.live(self.requests, self.tokens).tensors()
        self.output: Callable[[], Output] = partial(type(output), **rows)
        self.replays, self.missing_rows = 0, 0
        self.staged: list[dict[str, Any] | None] = [None] * ENTRIES
        self.writer = tuple(buffers.writer(entry, requests) for entry in range(ENTRIES)).__getitem__


NO_REPLAYS = ReplayStats(replays=0, padded_rows=0, fallbacks={}, replays_by_size={})
"""Statistics of a runner that was never captured."""


class Replayer(Generic[OutputT]):
    """Replays captured graphs for live batches.

    Args:
        step: The captured step.
        table: Captured sizes.
        graphs: The graph of each size.
        dispatch: Names the fields that the graphs do not read.
        backend: Backend of the graphs.
    """

    def __init__(
        self,
        step: Step[OutputT],
        table: SizeTable,
        graphs: Mapping[int, CapturedGraph],
        dispatch: Dispatch,
        backend: Backend,
    ) -> None:
        self.graphs = dict(graphs)
        self._step, self._table, self.dispatch, self.backend = step, table, dispatch, backend
        self.buffers, self._mailbox = step.buffers, step.buffers.mailbox
        self._inputs_type = dispatch.inputs_type
        self._checks, self._bound_fields = self.buffers.checks, self.buffers.bound_fields
        self._absent = self._checks.absent
        self.plan_on_host = step.plan_on_host if step.plans_on_host else None
        self._ragged = self.buffers.capacity.ragged
        self.compares_fields = self._checks.compares_fields
        self.consensus: ReplayConsensus | None = None
        """Agrees with other ranks on staged batches. They have agreed on other batches before."""
        self.frozen: FrozenValues | None = None
        """In the checking mode, refuses graphs that keep a host number which has changed."""
        self.launch: Callable[[ReplayPlan, int, int, list[Any]], OutputT] = self._launch_graph
        """Launches the graph of a plan for a written entry. ``observe`` replaces it for a block."""
        self._value_checks = self.buffers.value_checks
        self._final_stats: ReplayStats | None = None
        self.plans: dict[tuple[int, int | None], ReplayPlan] = {}
        """By live size and the captured size that the caller names; made at the first replay."""

    def replay(self, batch: Any, padded_batch_size: int | None) -> OutputT:
        """Replay a batch; see ``Runner.replay``."""
        if not isinstance(batch, self._inputs_type):
            self.dispatch.require_inputs(batch)  # raises
        if self._value_checks is not None:
            self._value_checks.report()
            self._value_checks.check(batch)
        try:
            plan = self.plans.get((batch.batch_size, padded_batch_size))
        except TypeError:  # it has no hash
            require_count("padded_batch_size", padded_batch_size)
            raise
        if plan is None:
            if batch.batch_size == 0:
                self._checks.check_idle(batch)
                return self.idle() if padded_batch_size is None else self.pads(padded_batch_size)
            plan = self.make_plan(batch.batch_size, padded_batch_size)
        if self.frozen is not None:
            self.frozen.check(plan.padded_batch_size)
        for name in self._absent:  # as BatchChecks.surplus_field, without the cost of a call
            if getattr(batch, name, None) is not None:
                raise InputError(self._checks.not_captured(name), field=name)
        if self._bound_fields:
            self._checks.check_bound(batch)
        tokens = self._checked_tokens(batch, plan) if self.compares_fields else plan.tokens
        entry = self._mailbox.claim()
        in_flight = self.writer(plan, entry, tokens).write(batch)
        if self.plan_on_host is not None:
            self.plan_on_host(batch, plan.padded_batch_size)
        return self.launch(plan, entry, tokens, in_flight)

    def pads(self, size: int) -> OutputT:
        """Replay a graph of pads, for an idle batch whose collectives others wait for."""
        plan = self.plans.get((0, size)) or self.make_plan(0, size)
        entry = self._mailbox.claim()
        if self.plan_on_host is not None:
            self.plan_on_host(self.buffers.view(size), size)
        return self.launch(plan, entry, 0, [])

    def idle(self) -> OutputT:
        """Return an output without rows. Nothing is launched."""
        graph = self.graphs[self._table.largest]
        return self._step.output_type(**graph.output).live(0, 0)

    def stats(self) -> ReplayStats:
        """Return the counts of the replays so far, without fallbacks; also when closed."""
        if self._final_stats is not None:
            return self._final_stats
        by_size, live_sizes, padded_rows = Counter[int](), Counter[int](), 0
        for plan in (plan for plan in self.plans.values() if plan.replays):
            by_size[plan.padded_batch_size] += plan.replays
            if plan.requests:
                live_sizes[plan.requests] += plan.replays
            rows = self.buffers.capacity.rows(Axis.TOKEN, plan.padded_batch_size)
            padded_rows += plan.replays * (rows - plan.tokens) + plan.missing_rows
        return ReplayStats(
            replays=by_size.total(),
            padded_rows=padded_rows,
            fallbacks={},
            replays_by_size=dict(sorted(by_size.items())),
            live_sizes=dict(sorted(live_sizes.items())),
        )

    def counts(self) -> dict[ReplayPlan, tuple[int, int]]:
        """Return replays and missing rows of each plan, for ``reset_counts``."""
        return {plan: (plan.replays, plan.missing_rows) for plan in self.plans.values()}

    def reset_counts(self, counts: Mapping[ReplayPlan, tuple[int, int]]) -> None:
        """Set the counts of plans to earlier ones; 0 for plans that were made since."""
        for plan in self.plans.values():
            plan.replays, plan.missing_rows = counts.get(plan, (0, 0))

    def close(self) -> None:
        """Close the graphs. Staged batches become invalid."""
        self._final_stats = self.stats()
        self._mailbox.claims += 1
        for graph in self.graphs.values():
            graph.close()
        self.graphs, self.plans = {}, {}

    def writer(self, plan: ReplayPlan, entry: int, tokens: int) -> BatchWriter:
        """Return the writer of a batch. Ragged batches have too many writers to keep."""
        if tokens == plan.tokens:
            return plan.writer(entry)
        return self.buffers.writer(entry, plan.requests, tokens)

    def _launch_graph(
        self, plan: ReplayPlan, entry: int, tokens: int, in_flight: list[Any]
    ) -> OutputT:
        """Post a written entry and launch. If the launch fails, the runner stays usable."""
        mailbox = self._mailbox
        mailbox.post(entry, plan.requests, tokens, plan.has_rows)
        plan.launch()
        mailbox.commit(in_flight)
        plan.replays += 1
        plan.missing_rows += plan.tokens - tokens
        return plan.output()  # type: ignore[return-value]

    def _checked_tokens(self, batch: Any, plan: ReplayPlan) -> int:
        """Return the number of rows of a batch, after checking its counts.

        The counts say which rows a graph selects, so a graph would not notice wrong ones.
        """
        tokens = plan.tokens
        if self._ragged:
            tokens = self._checks.count_tokens(batch)
            if wrong := self._checks.wrong_width(plan.requests, tokens):
                raise InputError(f"{wrong}.", field="num_tokens")
        self._checks.compare_fields(batch, tokens)
        return tokens

    def make_plan(self, requests: int, size: int | None) -> ReplayPlan:
        """Prepare the replays of so many requests at a size, or at the smallest that holds them.

        Raises:
            InputError: ``requests`` or ``size`` is not an int.
            SizeError: The size was not captured, or does not hold the requests.
        """
        require_count("batch_size", requests)
        if size is not None:
            require_count("padded_batch_size", size)
        padded = self._table.fit(max(requests, 0)) if size is None else size
        least = 1 if size is None else 0  # an idle batch replays pads at the size that it names
        if padded not in self.graphs or not least <= requests <= padded:
            raise size_error(requests, padded, self._table)
        graph = self.graphs[padded]
        output = self._step.output_type(**graph.output)
        plan = ReplayPlan(self.buffers, requests, padded, graph, output)
        self.plans[requests, size] = plan
        return plan
