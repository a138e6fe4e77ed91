"""Replay of captured graphs for live batches: everything that happens per replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar

from graphkit.buffers import Axis, BatchWriter
from graphkit.errors import GraphkitError, InputError, ReplayError, SizeError
from graphkit.graphs import Backend, CapturedGraph, SizeTable
from graphkit.runners.dispatch import Dispatch, require_count
from graphkit.runners.frozen_values import FrozenValues
from graphkit.runners.launch import Launch
from graphkit.runners.outputs import Output
from graphkit.runners.replay_consensus import ReplayConsensus
from graphkit.runners.replay_plan import ReplayPlan
from graphkit.runners.staged import StagedBatch
from graphkit.runners.step import Step

OutputT = TypeVar("OutputT", bound=Output)


@dataclass
class ReplayCount:
    """Replays by captured size and by live requests, and the number of padded rows."""

    by_size: Counter[int] = field(default_factory=Counter)
    live_sizes: Counter[int] = field(default_factory=Counter)
    padded_rows: int = 0


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
        self._step, self._table, self._dispatch, self._backend = step, table, dispatch, backend
        self._buffers, self._mailbox = step.buffers, step.buffers.mailbox
        self._inputs_type = dispatch.inputs_type
        self._absent, self._bound_fields = self._buffers.absent, self._buffers.bound_fields
        self._plan_on_host = step.plan_on_host if step.plans_on_host else None
        self._ragged, self._checks = self._buffers.capacity.ragged, self._buffers.has_checks
        self.consensus: ReplayConsensus | None = None
        """Agrees with other ranks on staged batches. They have agreed on other batches before."""
        self.frozen: FrozenValues | None = None
        """In the checking mode, refuses graphs that keep a host number which has changed."""
        self._launcher: Callable[[ReplayPlan, int, int, list[Any]], OutputT] = self._launch
        self._value_checks = self._buffers.value_checks
        self._final_count: ReplayCount | None = None
        self._plans: dict[tuple[int, int | None], ReplayPlan] = {}
        # Prepared now, so that the first replay of a size is as fast as the others.
        for requests in range(1, table.max_batch_size + 1):
            self._make_plan(requests, None)

    def replay(self, batch: Any, padded_batch_size: int | None) -> OutputT:
        """Replay a batch; see ``Runner.replay``."""
        if not isinstance(batch, self._inputs_type):
            self._dispatch.require_inputs(batch)  # raises
        if self._value_checks is not None:
            self._value_checks.report()
            self._value_checks.check(batch)
        plan = self._plans.get((batch.batch_size, padded_batch_size))
        if plan is None:
            if batch.batch_size == 0:
                self._dispatch.check_idle(batch)
                return self.idle() if padded_batch_size is None else self.pads(padded_batch_size)
            plan = self._make_plan(batch.batch_size, padded_batch_size)
        if self.frozen is not None:
            self.frozen.check(plan.padded_batch_size)
        for name in self._absent:  # Dispatch.surplus_field, inlined
            if getattr(batch, name, None) is not None:
                raise InputError(self._buffers.not_captured(name), field=name)
        if self._bound_fields:
            self._buffers.check_bound(batch)
        tokens = self._checked_tokens(batch, plan) if self._checks else plan.tokens
        entry = self._mailbox.claim()
        in_flight = self._writer(plan, entry, tokens).write(batch)
        if self._plan_on_host is not None:
            self._plan_on_host(batch, plan.padded_batch_size)
        return self._launcher(plan, entry, tokens, in_flight)

    def stage(self, batch_size: int, num_tokens: int | None) -> StagedBatch[OutputT]:
        """Claim an entry and return its views; see ``Runner.stage``."""
        if self._plan_on_host is not None:
            raise ReplayError(
                "stage() is not available: the attention backend plans each batch on the host and "
                "needs the whole batch. Use replay(batch)."
            )
        if self._value_checks is not None:
            self._value_checks.report()
        plan = self._plans.get((batch_size, None)) or self._make_plan(batch_size, None)
        if self.frozen is not None:
            self.frozen.check(plan.padded_batch_size)
        tokens = plan.tokens if num_tokens is None else num_tokens
        if num_tokens is not None:
            self._check_tokens(plan, tokens)
        entry = self._mailbox.claim()
        self._buffers.pad_entry(entry)
        attributes = plan.staged[entry] if tokens == plan.tokens else None
        if attributes is None:
            attributes = self._staged_attributes(plan, entry, tokens)
        return StagedBatch(attributes, self._mailbox.claims)

    @contextmanager
    def observed(self, observer: Callable[[Launch[OutputT]], OutputT]) -> Iterator[None]:
        """Pass every launch through an observer; see ``Runner.observe``."""
        inner = self._launcher

        def observe(plan: ReplayPlan, entry: int, tokens: int, in_flight: list[Any]) -> OutputT:
            claim = self._mailbox.claims
            launch = Launch(
                inner, self._buffers, self._backend, plan, entry, tokens, in_flight, claim
            )
            try:
                return observer(launch)
            finally:
                self._mailbox.claims += 1  # the launch ends with its observer

        self._launcher = observe
        try:
            yield
        finally:
            self._launcher = inner

    def pads(self, size: int) -> OutputT:
        """Replay a graph of pads, for an idle batch whose collectives others wait for."""
        plan = self._plans.get((0, size)) or self._make_plan(0, size)
        entry = self._mailbox.claim()
        if self._plan_on_host is not None:
            self._plan_on_host(self._buffers.view(size), size)
        return self._launcher(plan, entry, 0, [])

    def idle(self) -> OutputT:
        """Return an output without rows. Nothing is launched."""
        graph = self.graphs[self._table.largest]
        return self._step.output_type(**graph.output).live(0, 0)

    def count(self) -> ReplayCount:
        """Count the replays so far; also when closed."""
        if self._final_count is not None:
            return self._final_count
        count = ReplayCount()
        for plan in (plan for plan in self._plans.values() if plan.replays):
            count.by_size[plan.padded_batch_size] += plan.replays
            if plan.requests:
                count.live_sizes[plan.requests] += plan.replays
            rows = self._buffers.capacity.rows(Axis.TOKEN, plan.padded_batch_size)
            count.padded_rows += plan.replays * (rows - plan.tokens) + plan.missing_rows
        return count

    def close(self) -> None:
        """Close the graphs. Staged batches become invalid."""
        self._final_count = self.count()
        self._mailbox.claims += 1
        for graph in self.graphs.values():
            graph.close()
        self.graphs, self._plans = {}, {}

    def _launch(self, plan: ReplayPlan, entry: int, tokens: int, in_flight: list[Any]) -> OutputT:
        """Post a written entry and launch. If the launch fails, the runner stays usable."""
        mailbox = self._mailbox
        mailbox.post(entry, plan.requests, tokens, plan.has_rows)
        plan.launch()
        mailbox.commit(in_flight)
        plan.replays += 1
        plan.missing_rows += plan.tokens - tokens
        return plan.output()  # type: ignore[return-value]

    def _staged_attributes(self, plan: ReplayPlan, entry: int, tokens: int) -> dict[str, Any]:
        """Return the attributes that all staged batches of a size and an entry have."""
        writer = self._writer(plan, entry, tokens)

        def check(rows: Mapping[str, Any]) -> None:
            if self._checks:
                self._buffers.check(SimpleNamespace(**rows), tokens)
            if self._value_checks is not None:
                self._value_checks.check(SimpleNamespace(**rows))

        def start(chosen: ReplayPlan, in_flight: list[Any]) -> OutputT:
            self._mailbox.claims += 1  # the batch is launched once, also if the launch fails
            return self._launcher(chosen, entry, tokens, in_flight)

        def launch(rows: Mapping[str, Any], in_flight: list[Any]) -> OutputT:
            check(rows)
            return start(plan, in_flight)

        attributes = {
            **writer.views, "_writer": writer, "_launch": launch, "_unassigned": writer.by_address,
            "_refuse": _raise,
        }  # fmt: skip
        if (consensus := self.consensus) is not None:

            def launch_on_ranks(rows: Mapping[str, Any], in_flight: list[Any]) -> OutputT:
                size = consensus.agree_on_staged(
                    plan.requests, plan.padded_batch_size, partial(check, rows)
                )
                agreed = self._plans.get((plan.requests, size)) or self._make_plan(
                    plan.requests, size
                )
                return start(agreed, in_flight)

            attributes["_launch"] = partial(consensus.run, launch_on_ranks)
            attributes["_refuse"] = partial(consensus.run, consensus.refuse)
        if tokens == plan.tokens:
            plan.staged[entry] = attributes
        return attributes

    def _writer(self, plan: ReplayPlan, entry: int, tokens: int) -> BatchWriter:
        """Return the writer of a batch. Those of ragged batches are too many to keep."""
        if tokens == plan.tokens:
            return plan.writer(entry)
        return self._buffers.writer(entry, plan.requests, tokens)

    def _checked_tokens(self, batch: Any, plan: ReplayPlan) -> int:
        """Return the number of rows of a batch, after checking its counts.

        The counts say which rows a graph selects, so a graph would not notice wrong ones.
        """
        tokens = plan.tokens
        if self._ragged:
            tokens = self._buffers.tokens_of(batch)
            self._check_tokens(plan, tokens)
        self._buffers.check(batch, tokens)
        return tokens

    def _check_tokens(self, plan: ReplayPlan, tokens: int) -> None:
        least = plan.requests if self._ragged else plan.tokens
        if not least <= tokens <= plan.tokens:
            width = f"{'1 to ' if self._ragged else ''}{plan.tokens // plan.requests}"
            raise InputError(
                f"the batch has {tokens} tokens in {plan.requests} requests; captured are {width} "
                "tokens per request.",
                field="num_tokens",
            )

    def _make_plan(self, requests: int, size: int | None) -> ReplayPlan:
        require_count("batch_size", requests)
        padded = self._table.fit(max(requests, 0)) if size is None else size
        least = 1 if size is None else 0  # an idle batch replays pads at the size that it names
        if padded not in self.graphs or not least <= requests <= padded:
            raise SizeError(
                f"{requests} requests cannot run at batch size {padded}: "
                f"captured are {list(self._table)}.",
                batch_size=requests,
                largest=self._table.largest,
            )
        graph = self.graphs[padded]
        output = self._step.output_type(**graph.output)
        plan = ReplayPlan(self._buffers, requests, padded, graph, output)
        self._plans[requests, size] = plan
        return plan


def _raise(error: GraphkitError) -> NoReturn:
    raise error
