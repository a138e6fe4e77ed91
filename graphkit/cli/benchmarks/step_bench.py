"""Speculative steps of some models, measured in several generations and batch sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from graphkit.cli.benchmarks.measured_engine import MeasuredEngine, Steps, host_time_steps
from graphkit.cli.benchmarks.open_engine import open_engine, pieces, room_for
from graphkit.cli.benchmarks.step_measures import (
    BARE_STEP,
    bound_measures,
    cell,
    length_measures,
    node_measures,
    setting_name,
    step_measures,
    weight_measures,
)
from graphkit.cli.benchmarks.variants import Variant
from graphkit.cli.benchmarks.weight_bytes import WeightBytes, copy_bandwidth
from graphkit.engine import SpeculativeEngine
from graphkit.graphs import environment
from graphkit.graphs.streams import restore_fast_replays
from graphkit.records import BenchReport, Measure
from graphkit.spec import SpecConfig

_COUNTED_STEPS, _COUNTED_ROUNDS = 8, 5
"""Steps of a round whose CUDA calls are counted, and rounds, with those before the count."""
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
        weights: Weights that a step reads; ``None`` leaves the bound of a step out.
        variants: Ways to run the steps, at least one.
        text_ids: Token ids whose pieces are the prompts.
        context: Tokens of each prompt.
        steps: Least steps of a round, which is rounded up to whole launches of the longest loop, so
            that all variants measure the same part of the texts.
        rounds: Measured rounds of each variant.
        accept_lengths: Tokens per step and request for which to give the tokens per second.
    """

    engine: Callable[..., SpeculativeEngine]
    spec: SpecConfig
    algorithm: str
    device: torch.device
    dtype: torch.dtype
    weights: WeightBytes | None
    variants: Sequence[Variant]
    text_ids: Sequence[int]
    context: int
    steps: int
    rounds: int
    accept_lengths: Sequence[float] = ()

    @torch.no_grad()
    def report(
        self,
        name: str,
        batch_sizes: Sequence[int],
        notes: Mapping[str, str],
        progress: Progress = lambda *_: None,
    ) -> BenchReport:
        """Measure every batch size.

        On CUDA, the report also has the host's time, the bare step and its bound, and the CUDA
        calls, which are counted after all times: the profiler slows later launches.

        Args:
            name: Name of the report.
            batch_sizes: Requests that run at the same time.
            notes: Further settings of the report.
            progress: Called before each act.

        Raises:
            CaptureError: A forward cannot be captured.
            ConfigError: A variant cannot run.
        """
        parts = [partial(self._times, size) for size in batch_sizes]
        if self._is_cuda:
            parts += [
                partial(self._calls, size, variant)
                for size in batch_sizes
                for variant in self.variants
            ]
        measures = [] if self.weights is None else list(weight_measures(self.weights))
        for done, part in enumerate(parts):
            measures += part(partial(progress, done, len(parts)))
            if self._is_cuda:
                # Runners and their steps form cycles, which keep the KV pools of closed engines.
                gc.collect()
        return BenchReport(
            name=name,
            environment=environment(self.device),
            settings={**self._settings(), **notes},
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

    @property
    def _most_steps(self) -> int:
        """Most steps between two starts of the requests, the same for all engines."""
        steps, ahead = self._round, self._warm_up
        host = max(host_time_steps(steps, variant.steps_per_launch) for variant in self.variants)
        measured = max(host, self.rounds * steps) if self._is_cuda else steps
        return ahead + measured + ahead

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest context that an engine needs."""
        most = self._most_steps
        if self._is_cuda:
            most = max(most, *map(self._counted_steps, self.variants))
        return self.context + room_for(most, self.spec)

    def _counted_steps(self, variant: Variant) -> int:
        """Return the steps of an engine whose CUDA calls are counted."""
        return 2 * self._warm_up + _COUNTED_ROUNDS * variant.whole_launches(_COUNTED_STEPS)

    def _times(self, size: int, progress: Callable[[str], None]) -> Iterator[Measure]:
        setting, seen = setting_name(size), {variant.name: Steps() for variant in self.variants}
        with ExitStack() as stack:
            engines: dict[Variant, MeasuredEngine] = {}
            for variant in self.variants:
                progress(f"{setting}: capturing {variant.name}")
                opened = self._open(size, variant, self._most_steps)
                engines[variant] = stack.enter_context(opened)
            # Replays of a process have two speeds: measure all engines at the same one.
            restore_fast_replays(self.device)
            for number in range(1, self.rounds + 1):
                for variant, engine in engines.items():
                    progress(f"{setting}, round {number} of {self.rounds}: {variant.name}")
                    engine.run(self._round, seen[variant.name])
            for name, steps in seen.items():
                yield from step_measures(size, name, steps, self.accept_lengths)
                if self.spec.is_adaptive:
                    drafts = [length.num_draft_tokens - 1 for length in self.spec.lengths]
                    yield from length_measures(size, name, steps, drafts)
            if self._is_cuda:
                for variant, engine in engines.items():
                    progress(f"{setting}, host time: {variant.name}")
                    yield cell(
                        setting, variant.name, "host", engine.host_us(self._round)["host"], "us"
                    )
            loops = (engine for variant, engine in engines.items() if variant.generation == "v3")
            for engine in list(loops)[:1]:
                progress(f"{setting}: the bare step")
                yield from self._bare(size, engine, seen)

    def _bare(
        self, size: int, engine: MeasuredEngine, seen: Mapping[str, Steps]
    ) -> Iterator[Measure]:
        with closing(engine.bare_step()) as bare:
            yield from node_measures(size, bare.nodes())
            if not self._is_cuda:
                return
            bare_ms = median(bare.ms(self._round) for _ in range(self.rounds))
        yield cell(setting_name(size), "", BARE_STEP, bare_ms, "ms")
        if self.weights is not None:
            bandwidth = copy_bandwidth(self.device)
            yield from bound_measures(size, bare_ms, self.weights, bandwidth)
        for name, steps in seen.items():
            yield cell(setting_name(size), name, "GPU busy", bare_ms / steps.ms_per_step)

    def _calls(
        self, size: int, variant: Variant, progress: Callable[[str], None]
    ) -> Iterator[Measure]:
        setting = setting_name(size)
        progress(f"{setting}: counting the CUDA calls of {variant.name}")
        with self._open(size, variant, self._counted_steps(variant)) as engine:
            calls = sum(engine.cuda_calls(_COUNTED_STEPS).values())
        yield cell(setting, variant.name, "CUDA calls", calls, "per step")

    def _open(
        self, size: int, variant: Variant, most_steps: int
    ) -> AbstractContextManager[MeasuredEngine]:
        prompts = pieces(self.text_ids, size, self.context)
        return open_engine(
            self.engine, self.spec, variant, prompts,
            warm_up_steps=self._warm_up, most_steps=most_steps,
        )  # fmt: skip

    def _settings(self) -> dict[str, int | str]:
        return {
            "algorithm": self.algorithm,
            "topk": self.spec.topk,
            "num_steps": _listed(self.spec.num_steps),
            "num_draft_tokens": _listed(self.spec.num_draft_tokens),
            "dtype": str(self.dtype).removeprefix("torch."),
            "context": self.context,
            "steps per round": self._round,
            "rounds": self.rounds,
        }


def _listed(value: object) -> int | str:
    """Return a setting, as text if it has a value per draft length."""
    return value if isinstance(value, int) else ", ".join(map(str, value))  # type: ignore[call-overload]
