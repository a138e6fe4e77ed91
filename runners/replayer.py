"""The way of a batch through a captured runner: everything that happens per replay is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar

from graphkit.buffers import Axis
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
        shadow: ``"padded"`` runs the identical padded path without the graph.
    """

    def __init__(self, parts: Parts[OutputT], graphs: Mapping[int, CapturedGraph]) -> None:
        self.graphs = dict(graphs)
        self.shadow: Literal["padded"] | None = None
        self._parts = parts
        self._mailbox = parts.buffers.mailbox
        self._absent, self._before_replay = parts.buffers.absent, parts.plan_on_host
        self._check = parts.buffers.check if parts.buffers.inputs.check_matters() else None
        self._varies = parts.buffers.capacity.varies
        self._final_count: tuple[Counter[int], int] | None = None
        self._fits: dict[tuple[int, int | None, int | None], Fit] = {}
        # Made now, so that the first replay of a size is no slower than the others. Where rows vary
        # there are too many pairs of requests and tokens: theirs are made when they first come.
        if not self._varies:
            for requests in range(1, parts.table.max_batch_size + 1):
                self._make_fit(requests, None, None)

    def replay(self, batch: Any, padded_batch_size: int | None) -> OutputT:
        """See ``Runner.replay``."""
        tokens = self._parts.buffers.tokens_of(batch) if self._varies else None
        fit = self._fits.get((batch.batch_size, padded_batch_size, tokens))
        if fit is None:
            if batch.batch_size == 0:
                return self.idle()
            fit = self._make_fit(batch.batch_size, padded_batch_size, tokens)
        for name in self._absent:  # Dispatch.surplus_field, without the call
            if getattr(batch, name, None) is not None:
                raise InputError(self._parts.buffers.not_captured(name), field=name)
        if self._check is not None:
            self._check(batch, fit.tokens)
        slot = self._mailbox.claim()
        in_flight = fit.writer(slot).write(batch)
        if self._before_replay is not None:
            self._before_replay(batch, fit.padded_batch_size)
        return self.launch(fit, slot, in_flight)

    def stage(self, batch_size: int, num_tokens: int | None) -> StagedBatch[OutputT]:
        """See ``Runner.stage``."""
        if self._before_replay is not None:
            raise ReplayError(
                "the attention backend plans each batch on the host, so it needs a whole one. "
                "Use replay(batch)."
            )
        tokens = self._staged_tokens(batch_size, num_tokens)
        key = batch_size, None, tokens
        fit = self._fits.get(key) or self._make_fit(*key)
        slot = self._mailbox.claim()
        self._parts.buffers.pad_slot(slot)
        return StagedBatch(self, fit, slot, self._mailbox.claims)

    def replay_staged(
        self, fit: Fit, slot: int, claim: int, in_flight: list[Any], rows: Mapping[str, Any]
    ) -> OutputT:
        """See ``StagedBatch.replay``; ``rows`` are those that the host can still see."""
        if claim != self._mailbox.claims or not self.graphs:
            raise ReplayError(
                "this staged batch is over: its slot was replayed or taken by another batch, or "
                "the runner was closed. Call stage() again."
            )
        if self._check is not None:
            self._check(SimpleNamespace(**rows), fit.tokens)
        return self.launch(fit, slot, in_flight)

    def launch(self, fit: Fit, slot: int, in_flight: list[Any]) -> OutputT:
        """Post the written slot and launch. A launch that fails loses nothing but itself."""
        mailbox = self._mailbox
        mailbox.post(slot, fit.requests, fit.tokens)
        if self.shadow is not None:
            return self._launch_padded(fit, in_flight)
        try:
            fit.launch()
        except BaseException:
            mailbox.resume()
            raise
        mailbox.commit(in_flight)
        fit.replays += 1
        return fit.output  # type: ignore[return-value]

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
            padded += fit.replays * (rows - fit.tokens)
        return by_size, padded

    def close(self) -> None:
        """Give the graphs back."""
        self._final_count = self.count()
        for graph in self.graphs.values():
            graph.close()
        self.graphs, self._fits = {}, {}

    def _launch_padded(self, fit: Fit, in_flight: list[Any]) -> OutputT:
        """What the graph does, without it."""
        self._parts.backend.order()
        self._parts.buffers.refresh(fit.padded_batch_size)
        self._mailbox.commit(in_flight)
        stages = self._parts.step.padded(fit.padded_batch_size)
        output = [stage() for stage in stages][-1].live(fit.requests, fit.tokens)
        fit.replays += 1
        return output

    def _staged_tokens(self, batch_size: int, num_tokens: int | None) -> int | None:
        """Part of the key of a fit; given where rows vary, and only there."""
        full = self._parts.buffers.capacity.rows(Axis.TOKEN, batch_size)
        if self._varies:
            return full if num_tokens is None else num_tokens
        if num_tokens not in (None, full):
            raise InputError(
                f"{num_tokens} tokens in {batch_size} requests: this runner captured "
                f"{full // max(batch_size, 1)} per request. Leave num_tokens out.",
                field="num_tokens",
            )
        return None

    def _make_fit(self, requests: int, size: int | None, tokens: int | None) -> Fit:
        padded = self._parts.table.fit(requests) if size is None else size
        if padded not in self.graphs or not 0 < requests <= padded:
            raise SizeError(
                f"{requests} requests cannot run at batch size {padded}: "
                f"captured are {list(self._parts.table)}.",
                batch_size=requests,
                largest=self._parts.table.largest,
            )
        most = self._parts.buffers.capacity.rows(Axis.TOKEN, requests)
        if tokens is not None and not requests <= tokens <= most:
            raise InputError(
                f"{tokens} tokens in {requests} requests: captured are 1 to {most // requests} "
                "tokens per request.",
                field="input_ids",
            )
        graph = self.graphs[padded]
        output = self._parts.output_type(**graph.output)
        fit = Fit(self._parts.buffers, requests, padded, graph, output, tokens)
        self._fits[requests, size, tokens] = fit
        return fit
