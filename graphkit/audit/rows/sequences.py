"""Runs of whole texts: prompts in chunks and side by side, decoded tokens, chains and trees.

Chains also run packed, in steps that divide their rows among the requests.

Rows of prompts are compared with rows of prompts, and rows of steps with rows of steps. A row is
known by its request and by the text that it ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from graphkit.audit.rows.known_rows import RowRun
from graphkit.errors import TargetError
from graphkit.graphs import StateSnapshot
from graphkit.models.wrapper.comparison import skip_reason, unserved_field
from graphkit.models.wrapper.text_batches import (
    TextBatch,
    TextBatches,
    TreeRequest,
    run_batch,
    tree_requests,
    window_settings,
)
from graphkit.runners import Output, Runner
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

_SHORT_CHUNK = 7
"""Tokens of the short chunks of a prompt. Any small odd number serves."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One batch of a text: what it is, and the runner that runs it."""

    text: str
    runner: Runner[Any, Any]
    batch: TextBatch

    def run(self, target: CaptureTarget) -> Output:
        """Run the batch without a graph."""
        run = self.runner.fall_back
        return run_batch(
            self.batch, target.recurrent_state, lambda inputs, without: run(inputs, without=without)
        )


class Sequences:
    """Makes the runs of two requests of a target.

    Args:
        verify: Its runner for TARGET_VERIFY, or for DECODE if it has no other one.
        decode: Its runner for DECODE; ``verify`` decodes if there is none.
        start: Restored before each text.
        runs_texts: Whether the mode runs texts.

    Attributes:
        skipped: Why there are no runs, as a phrase; empty if there are some.
    """

    def __init__(
        self,
        target: CaptureTarget,
        verify: Runner[Any, Any],
        decode: Runner[Any, Any],
        start: StateSnapshot,
        *,
        runs_texts: bool = True,
    ) -> None:
        self._target, self._verify, self._decode, self._start = target, verify, decode, start
        self._requests: Sequence[TreeRequest] = ()
        self.skipped = ""
        if runs_texts:
            self.skipped = skip_reason(target, [verify.mode]) or unserved_field([verify, decode])
        if runs_texts and not self.skipped:
            windows = window_settings(target.weights, *target.forwards.values())
            try:
                self._requests = tree_requests(target, verify, windows, None)
            except TargetError as error:
                self.skipped = str(error).removeprefix(f"target {target.name!r}: ")

    def texts(self) -> Iterator[Iterator[tuple[RowRun, Output]]]:
        """Yield texts, each as its runs in order with their outputs."""
        for parts in self._parts() if self._requests else ():
            yield self._run(parts)

    def _run(self, parts: Sequence[_Part]) -> Iterator[tuple[RowRun, Output]]:
        self._start.restore()
        for number, part in enumerate(parts):
            run = self._row_run(parts, number)
            yield run, part.run(self._target)

    def _row_run(self, parts: Sequence[_Part], number: int) -> RowRun:
        """Return a run of one batch of a text, which repeats the batches before it."""
        part, target = parts[number], self._target
        kind = "step" if part.batch.is_step else "prompt"
        num_rows = part.batch.inputs.num_tokens
        keys: list[Hashable] = [object() for _ in range(num_rows)]  # of pads, which equal no other
        names = [""] * num_rows
        for source in part.batch.sources:
            for row, position in zip(source.rows, source.positions, strict=True):
                tokens = np.asarray(source.tokens)[: position + 1]
                keys[row] = (kind, source.request, tokens.tobytes())
                names[row] = f"position {position} of request {source.request}"

        def prepare() -> None:
            self._start.restore()
            for earlier in parts[:number]:
                earlier.run(target)

        run = partial(part.run, target)
        return RowRun(part.text, part.runner.step, keys, names, [1] * len(keys), prepare, run)

    def _parts(self) -> Iterator[Sequence[_Part]]:
        indices = range(len(self._requests))
        orders = {(0,), (len(indices) - 1,), tuple(indices), tuple(reversed(indices))}
        for index in indices:
            yield self._prompt(index)
        yield from self._cut_prompts()
        chains = [replace(request, parents=_chain(request)) for request in self._requests]
        has_trees = any((request.parents != _chain(request)).any() for request in self._requests)
        for requests in (self._requests, chains) if has_trees else (chains,):
            for index in indices:
                for path in requests[index].paths():
                    yield [*self._prompt(index), *self._decoded(index, path)]
            what = "chains" if requests is chains else "trees"
            for order in orders:
                yield [*self._prompts(), self._step(requests, order, what)]
        if self._packs_steps:
            most = self._width - 1
            for order in orders:
                none = (0,) * (len(order) - 1)
                for drafts in {(most, *none), (*none, most), (most // 2,) * len(order)}:
                    yield [*self._prompts(), self._packed_step(chains, order, drafts)]

    @property
    def _width(self) -> int:
        return self._verify.tokens_per_request

    @property
    def _packs_steps(self) -> bool:
        """Whether engines divide the rows of a step among its requests, see ``Verifier``."""
        step, is_chain = self._verify.step, self._verify.spec.topk == 1
        return self._width > 1 and is_chain and step.packs_rows and not step.plans_on_host

    def _prompt(self, index: int) -> list[_Part]:
        return [self._chunk([(index, range(len(self._requests[index].prompt)))])]

    def _prompts(self) -> list[_Part]:
        return [part for index in range(len(self._requests)) for part in self._prompt(index)]

    def _cut_prompts(self) -> Iterator[list[_Part]]:
        """Yield prompts in chunks, then several prompts in one batch."""
        for index, request in enumerate(self._requests):
            length = len(request.prompt)
            for chunk in {_SHORT_CHUNK, length - 1, (length + 1) // 2} & {*range(1, length)}:
                starts = range(0, length, chunk)
                spans = (range(start, min(start + chunk, length)) for start in starts)
                yield [self._chunk([(index, span)]) for span in spans]
        if len(self._requests) > 1 and self._verify.step.packs_rows:
            first, second = (range(len(request.prompt)) for request in self._requests)
            half = len(first) // 2
            yield [self._chunk([(0, first), (1, second)])]
            yield [self._chunk([(1, second), (0, first)])]
            yield [self._chunk([(0, first[:half])]), self._chunk([(1, second), (0, first[half:])])]

    def _chunk(self, spans: Sequence[tuple[int, range]]) -> _Part:
        batches = TextBatches(self._verify, self._requests)
        batch = batches.chunk(spans, is_packed=self._verify.step.packs_rows)
        lengths = " and ".join(str(len(span)) for _, span in spans)
        text = f"in a prefill of {lengths} tokens"
        return _Part(text, self._verify, batch)

    def _step(self, requests: Sequence[TreeRequest], order: Sequence[int], what: str) -> _Part:
        batch = TextBatches(self._verify, requests).step(order)
        text = f"in {what} of {self._width} rows of requests {list(order)}"
        if self._width == 1:
            text = f"decoded in a batch of requests {list(order)}"
        return _Part(text, self._verify, batch)

    def _packed_step(
        self, chains: Sequence[TreeRequest], order: Sequence[int], drafts: Sequence[int]
    ) -> _Part:
        counts = [count + 1 for count in drafts]
        # A captured number of rows may have pads, and has at most all rows of the requests.
        num_rows = min(sum(counts) + 1, len(counts) * self._width)
        batch = TextBatches(self._verify, chains).packed_step(order, drafts, num_rows)
        rows = " and ".join(map(str, counts))
        return _Part(f"in {rows} packed rows of requests {list(order)}", self._verify, batch)

    def _decoded(self, index: int, path: Sequence[int]) -> Iterator[_Part]:
        """Yield the tokens of a path, one by one."""
        request = self._requests[index]
        for depth, node in enumerate(path):
            before = request.tokens[list(path[:depth])]
            longer = replace(
                request,
                prompt=np.concatenate([request.prompt, before]),
                tokens=request.tokens[[node]],
                parents=request.parents[:1],
            )
            others = [longer] * len(self._requests)
            batch = TextBatches(self._decode, others, width=1).step([index])
            # States of recurrent layers are committed as those of a chunk of one token.
            batch = replace(batch, commits=True)
            yield _Part("decoded alone", self._decode, batch)


@contextmanager
def sequences_of(
    target: CaptureTarget, runner: Runner[Any, Any], start: StateSnapshot
) -> Iterator[Sequences]:
    """Yield the texts of a mode, none for a mode that computes no logits of the target.

    TARGET_VERIFY runs them together with DECODE.
    """
    verify, decode = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
    if runner.mode is verify and decode in target.forwards:
        with target.runner(decode, device=runner.device, check=False) as decoding:
            yield Sequences(target, runner, decoding, start)
    else:
        first = next((mode for mode in (verify, decode) if mode in target.forwards), None)
        yield Sequences(target, runner, runner, start, runs_texts=runner.mode is first)


def _chain(request: TreeRequest) -> Any:
    return np.maximum(np.arange(len(request.tokens)) - 1, 0)
