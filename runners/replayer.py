"""The way of a batch through a captured runner: everything that happens per replay is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar

from graphkit.buffers import Axis, BatchWriter
from graphkit.errors import InputError, ReplayError, SizeError
from graphkit.graphs import CapturedGraph
from graphkit.runners.fit import Fit
from graphkit.runners.outputs import Output
from graphkit.runners.parts import Parts
from graphkit.runners.staged import StagedBatch

OutputT = TypeVar("OutputT", bound=Output)


class Replayer(Generic[OutputT]):
    """Replays captured graphs for live batches.

    Attributes:
        mailbox: Of the runner's inputs.
        shadow: ``"padded"`` runs the identical padded path without the graph.
        ragged: Whether requests may bring fewer rows than captured, so that counts are looked at.
    """

    def __init__(self, parts: Parts[OutputT], graphs: Mapping[int, CapturedGraph]) -> None:
        self.graphs = dict(graphs)
        self.shadow: Literal["padded"] | None = None
        self._parts = parts
        self.mailbox = parts.buffers.mailbox
        self._absent, self._bound = parts.buffers.absent, parts.buffers.bound_fields
        self._before_replay = parts.plan_on_host
        self.ragged = parts.buffers.capacity.ragged
        self._final_count: tuple[Counter[int], int] | None = None
        self._fits: dict[tuple[int, int | None], Fit] = {}
        # Made now, so that the first replay of a size is no slower than the others.
        for requests in range(1, parts.table.max_batch_size + 1):
            self._make_fit(requests, None)

    def replay(self, batch: Any, padded_batch_size: int | None) -> OutputT:
        """See ``Runner.replay``."""
        fit = self._fits.get((batch.batch_size, padded_batch_size))
        if fit is None:
            if batch.batch_size == 0:
                self._parts.dispatch.check_idle(batch)
                return self.idle()
            fit = self._make_fit(batch.batch_size, padded_batch_size)
        for name in self._absent:  # Dispatch.surplus_field, without the call
            if getattr(batch, name, None) is not None:
                raise InputError(self._parts.buffers.not_captured(name), field=name)
        if self._bound:
            self._parts.buffers.check_bound(batch)
        tokens = self._checked_tokens(batch, fit) if self.ragged else fit.tokens
        entry = self.mailbox.claim()
        in_flight = self._writer(fit, entry, tokens).write(batch)
        if self._before_replay is not None:
            self._before_replay(batch, fit.padded_batch_size)
        return self.launch(fit, entry, tokens, in_flight)

    def stage(self, batch_size: int, num_tokens: int | None) -> StagedBatch[OutputT]:
        """See ``Runner.stage``."""
        if self._before_replay is not None:
            raise ReplayError(
                "the attention backend plans each batch on the host, so it needs a whole one. "
                "Use replay(batch)."
            )
        fit = self._fits.get((batch_size, None)) or self._make_fit(batch_size, None)
        tokens = fit.tokens if num_tokens is None else num_tokens
        self._check_tokens(fit, tokens)
        entry = self.mailbox.claim()
        self._parts.buffers.pad_entry(entry)
        return StagedBatch(self, fit, self._writer(fit, entry, tokens), entry, tokens)

    def check(self, rows: Mapping[str, Any], tokens: int) -> None:
        """Refuse staged rows that contradict each other; ``None`` for those that left the entry."""
        self._parts.buffers.check(SimpleNamespace(**rows), tokens)

    def launch(self, fit: Fit, entry: int, tokens: int, in_flight: list[Any]) -> OutputT:
        """Post the written entry and launch. A launch that fails loses nothing but itself."""
        mailbox = self.mailbox
        mailbox.post(entry, fit.requests, tokens)
        if self.shadow is not None:
            return self._launch_padded(fit, tokens, in_flight)
        try:
            fit.launch()
        except BaseException:
            mailbox.resume()
            raise
        mailbox.commit(in_flight)
        fit.replays += 1
        fit.spared += fit.tokens - tokens
        return fit.output()  # type: ignore[return-value]

    @contextmanager
    def watched(self, around: Callable[..., OutputT]) -> Iterator[None]:
        """Have ``around(launch, fit, entry, tokens, in_flight)`` stand for every launch of a block.

        Blocks may be nested. ``launch`` is what it stands for.
        """
        outer = vars(self).get("launch")
        vars(self)["launch"] = partial(around, self.launch)
        try:
            yield
        finally:
            del vars(self)["launch"]
            if outer is not None:
                vars(self)["launch"] = outer

    def idle(self) -> OutputT:
        """An output without rows; nothing is launched."""
        return self._parts.output_type(**self.graphs[self._parts.table.largest].output).live(0, 0)

    def count(self) -> tuple[Counter[int], int]:
        """Replays by captured size, and rows padded in all; also after ``close``."""
        if self._final_count is not None:
            return self._final_count
        by_size: Counter[int] = Counter()
        padded = 0
        for fit in (fit for fit in self._fits.values() if fit.replays):
            by_size[fit.padded_batch_size] += fit.replays
            rows = self._parts.buffers.capacity.rows(Axis.TOKEN, fit.padded_batch_size)
            padded += fit.replays * (rows - fit.tokens) + fit.spared
        return by_size, padded

    def close(self) -> None:
        """Give the graphs back."""
        self._final_count = self.count()
        self.mailbox.claims += 1  # what was staged is over
        for graph in self.graphs.values():
            graph.close()
        self.graphs, self._fits = {}, {}

    def _launch_padded(self, fit: Fit, tokens: int, in_flight: list[Any]) -> OutputT:
        """What the graph does, without it."""
        self._parts.backend.order()
        self._parts.buffers.refresh(fit.padded_batch_size)
        self.mailbox.commit(in_flight)
        stages = self._parts.step.padded(fit.padded_batch_size)
        output = [stage() for stage in stages][-1].live(fit.requests, tokens)
        fit.replays += 1
        fit.spared += fit.tokens - tokens
        return output

    def _writer(self, fit: Fit, entry: int, tokens: int) -> BatchWriter:
        """Kept at full width; pairs of requests and tokens are too many to keep."""
        if tokens == fit.tokens:
            return fit.writer(entry)
        return self._parts.buffers.writer(entry, fit.requests, tokens)

    def _checked_tokens(self, batch: Any, fit: Fit) -> int:
        """The batch's rows. Its counts say whose they are, so wrong ones would go unseen.

        Where every request has as many, nothing depends on the counts' values, and reading them
        would cost more than the launch: there ``can_replay`` looks, and a replay does not.
        """
        tokens = self._parts.buffers.tokens_of(batch)
        self._check_tokens(fit, tokens)
        self._parts.buffers.check(batch, tokens)
        return tokens

    def _check_tokens(self, fit: Fit, tokens: int) -> None:
        least = fit.requests if self.ragged else fit.tokens
        if not least <= tokens <= fit.tokens:
            width = f"{'1 to ' if self.ragged else ''}{fit.tokens // fit.requests}"
            raise InputError(
                f"{tokens} tokens in {fit.requests} requests; captured are {width} tokens per "
                "request.",
                field="num_tokens",
            )

    def _make_fit(self, requests: int, size: int | None) -> Fit:
        padded = self._parts.table.fit(requests) if size is None else size
        if padded not in self.graphs or not 0 < requests <= padded:
            raise SizeError(
                f"{requests} requests cannot run at batch size {padded}: "
                f"captured are {list(self._parts.table)}.",
                batch_size=requests,
                largest=self._parts.table.largest,
            )
        graph = self.graphs[padded]
        output = self._parts.output_type(**graph.output)
        fit = Fit(self._parts.buffers, requests, padded, graph, output)
        self._fits[requests, size] = fit
        return fit
