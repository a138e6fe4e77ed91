"""Speculative steps of some models, measured in several generations and batch sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from graphkit.cli.benchmarks.measured_engine import MeasuredEngine, Steps, Variant
from graphkit.cli.benchmarks.step_bound import WeightBytes, copy_bandwidth
from graphkit.engine import SpeculativeEngine
from graphkit.engine.step.admission import LEAST_BESIDE
from graphkit.graphs import environment
from graphkit.graphs.streams import restore_fast_replays
from graphkit.records import BenchReport, Measure
from graphkit.spec import SpecConfig

_COUNTED_STEPS = 8
"""Steps whose experts are counted."""
Progress = Callable[[int, int, str], None]
"""Takes the parts done, all parts, and a description of the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is measured: models, settings, and variants that take turns.

    All variants of a batch size are alive at the same time, over the same weights. Each has KV
    pools of its own.

    Attributes:
        engine: Creates an engine over the models, with the arguments of ``SpeculativeEngine``,
            ``max_batch_size`` and ``max_context_len``.
        spec: Settings of drafts of these engines.
        algorithm: Name of the algorithm in the report.
        device: Device of the models.
        dtype: Data type of the weights.
        weights: Weights that a step reads.
        variants: Ways to run the steps, at least one.
        text_ids: Token ids whose pieces are the prompts.
        context: Tokens of each prompt.
        steps: Least steps of a round, which is rounded up to whole launches of the longest loop, so
            that all variants measure the same part of the texts.
        rounds: Measured rounds of each variant.
    """

    engine: Callable[..., SpeculativeEngine]
    spec: SpecConfig
    algorithm: str
    device: torch.device
    dtype: torch.dtype
    weights: WeightBytes
    variants: Sequence[Variant]
    text_ids: Sequence[int]
    context: int
    steps: int
    rounds: int

    @torch.no_grad()
    def report(
        self,
        name: str,
        batch_sizes: Sequence[int],
        notes: Mapping[str, str],
        progress: Progress = lambda *_: None,
    ) -> BenchReport:
        """Measure every batch size; ``notes`` are further settings of the report.

        On CUDA, the report also has the bare step and its bound.

        Raises:
            CaptureError: A forward cannot be captured.
            ConfigError: A variant cannot run.
        """
        weights = {"verify": self.weights.verify, "drafts": self.weights.drafts}
        measures = [
            Measure(name=f"weights read by {name}", value=read / 1e6, unit="MB")
            for name, read in weights.items()
        ]
        for done, size in enumerate(batch_sizes):
            measures += self._times(size, partial(progress, done, len(batch_sizes)))
            if self._is_cuda:
                # Runners and their steps form cycles, which keep the KV pools of closed engines.
                gc.collect()
        return BenchReport(
            name=name,
            environment=environment(self.device),
            settings={
                "algorithm": self.algorithm,
                "topk": self.spec.topk,
                "num_steps": _listed(self.spec.num_steps),
                "num_draft_tokens": _listed(self.spec.num_draft_tokens),
                "dtype": str(self.dtype).removeprefix("torch."),
                "context": self.context,
                "steps per round": self._round,
                "rounds": self.rounds,
                **notes,
            },
            measures=tuple(measures),
        )

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _round(self) -> int:
        """Steps of a round."""
        return max(variant.whole_launches(self.steps) for variant in self.variants)

    @property
    def _warm_up(self) -> int:
        """Steps before each measurement."""
        return max(variant.steps_in_flight for variant in self.variants)

    def max_context_len(self, size: int) -> int:
        """Return the tokens of the longest context that an engine of a batch size needs."""
        # The first requests run a step behind each forward that prefills others.
        forwards = size * -(-self.context // LEAST_BESIDE)
        # Most steps between two starts of the requests, the same for all engines.
        steps = self._warm_up + self._round + self._warm_up
        if self.weights.experts:
            steps += _COUNTED_STEPS
        return self.context + room_for(forwards + steps, self.spec)

    def _times(self, size: int, progress: Callable[[str], None]) -> Iterator[Measure]:
        seen = {variant.name: Steps() for variant in self.variants}
        with ExitStack() as stack:
            engines: dict[Variant, MeasuredEngine] = {}
            for variant in self.variants:
                progress(f"batch {size}: capturing {variant.name}")
                engines[variant] = stack.enter_context(self._open(size, variant))
            # Replays of a process have two speeds: measure all engines at the same one.
            restore_fast_replays(self.device)
            for number in range(1, self.rounds + 1):
                for variant, engine in engines.items():
                    progress(f"batch {size}, round {number} of {self.rounds}: {variant.name}")
                    engine.run(self._round, seen[variant.name])
            for name, steps in seen.items():
                yield from self._step_measures(size, name, steps)
            loops = (engine for variant, engine in engines.items() if variant.generation == "v3")
            for engine in list(loops)[:1]:
                progress(f"batch {size}: the bare step")
                yield from self._bare(size, engine, seen)

    def _step_measures(self, size: int, variant: str, steps: Steps) -> Iterator[Measure]:
        """Yield time, latency and speed of measured steps, and the share of each draft length.

        A step takes the same time whatever it accepts.
        """
        yield cell(size, variant, "time per step", steps.ms_per_step, "ms")
        yield cell(size, variant, "p50", steps.latency_ms(50), "ms")
        yield cell(size, variant, "p99", steps.latency_ms(99), "ms")
        yield cell(size, variant, "accept length", steps.tokens_per_step / size)
        yield cell(size, variant, "tokens", steps.tokens_per_second, "tokens/s")
        if self.spec.is_adaptive:
            drafted = steps.drafted_lengths
            for drafts in (length.num_draft_tokens - 1 for length in self.spec.lengths):
                share = drafted[drafts] / drafted.total()
                yield cell(size, variant, f"steps of {drafts} drafts", share)
            plain, taken = steps.seconds
            if taken:
                yield cell(size, variant, "speed over plain decoding", plain / taken, "x")

    def _bare(
        self, size: int, engine: MeasuredEngine, seen: Mapping[str, Steps]
    ) -> Iterator[Measure]:
        """Yield nodes and time of the captured step alone, and the time to read its weights."""
        with closing(engine.bare_step()) as bare:
            nodes = bare.nodes()
            yield from (cell(size, "", name, nodes[name]) for name in ("nodes", "own nodes"))
            experts = 0.0
            if self.weights.experts:
                experts = bare.expert_bytes(self.weights.experts, _COUNTED_STEPS)
                yield cell(size, "", "experts read by a step", experts / 1e6, "MB")
            if not self._is_cuda:
                return
            bare_ms = bare.ms(self._round)
        yield cell(size, "", "bare step", bare_ms, "ms")
        bandwidth = copy_bandwidth(self.device)
        bound_ms = (self.weights.total + experts) / bandwidth * 1e3
        yield cell(size, "", "copy bandwidth", bandwidth / 1e9, "GB/s")
        yield cell(size, "", "weights at the copy bandwidth", bound_ms, "ms")
        yield cell(size, "", "bare step over that", bare_ms / bound_ms, "x")
        for name, steps in seen.items():
            yield cell(size, name, "GPU busy", bare_ms / steps.ms_per_step)

    @contextmanager
    def _open(self, size: int, variant: Variant) -> Iterator[MeasuredEngine]:
        """Open an engine for a block, for as many requests, with KV pools of its own."""
        with self.engine(
            max_batch_size=size,
            batch_sizes=[size],
            max_context_len=self.max_context_len(size),
            generation=variant.generation,
            steps_per_launch=variant.steps_per_launch,
        ) as opened:
            prompts = pieces(self.text_ids, size, self.context)
            yield MeasuredEngine(opened, variant, prompts, self._warm_up)


def _listed(value: object) -> int | str:
    """Return a setting, as text if it has a value per draft length."""
    return value if isinstance(value, int) else ", ".join(map(str, value))  # type: ignore[call-overload]


def cell(batch_size: int, variant: str, name: str, value: float, unit: str = "") -> Measure:
    """Return a measure of a batch size; without a variant, one of the batch size itself."""
    return Measure(
        name=name, value=value, unit=unit, setting=f"batch {batch_size}", variant=variant
    )


def room_for(steps: int, spec: SpecConfig) -> int:
    """Return the tokens that a request needs beside its prompt for a number of steps."""
    ahead = spec.longest.num_draft_tokens + spec.topk * spec.longest.num_steps
    # Prefill gives a token, v2 runs a step more than it reports, and no request may end.
    return (steps + 3) * longest_path(spec) + ahead


def longest_path(spec: SpecConfig) -> int:
    """Return the most tokens that a step can accept, bonus included."""
    longest = spec.longest
    is_ngram = spec.resolved.name == "NGRAM"
    return longest.num_draft_tokens if is_ngram else longest.num_steps + 1


def pieces(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return ``count`` pieces of a text, each of ``length`` tokens, at different places of it.

    A text that is too short is repeated; it has at least one token.
    """
    text = list(ids) * -(-(length + count) // len(ids))
    distance = (len(text) - length) // count
    return [text[start : start + length] for start in range(0, count * distance, distance)]
