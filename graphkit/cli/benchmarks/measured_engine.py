"""An engine with a full batch of long requests, and what is measured of its steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np

from graphkit.cli.benchmarks.step_bound import BareStep
from graphkit.engine import Request, SpeculativeEngine
from graphkit.engine.step import SamplingParams, SpecStepRunner
from graphkit.errors import ConfigError

_LAUNCHES_IN_FLIGHT = 2
"""Most launches of a generation that have begun and are not read."""
Generation = Literal["v1", "v2", "v3"]
"""Generation of steps: host in the loop, overlapped, on the device."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run steps.

    Attributes:
        name: Its name in reports.
        generation: As for ``SpeculativeEngine``.
        steps_per_launch: Most steps of one launch of v3; 1 in the other generations.
    """

    name: str
    generation: Generation
    steps_per_launch: int = 1

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are enqueued and not delivered when a step of the engine returns."""
        return _LAUNCHES_IN_FLIGHT * self.steps_per_launch

    @property
    def steps_ahead(self) -> int:
        """Steps that are enqueued and not delivered when a launch has been delivered whole."""
        return 0 if self.generation == "v1" else self.steps_per_launch

    def whole_launches(self, steps: int) -> int:
        """Return the steps of the fewest launches that run at least ``steps`` steps."""
        return -(-steps // self.steps_per_launch) * self.steps_per_launch


def make_variants(
    generations: Collection[Generation], steps_per_launch: Sequence[int]
) -> Iterator[Variant]:
    """Yield v1 and v2 as far as they are chosen, and for v3 each number of steps per launch."""
    for generation in ("v1", "v2"):
        if generation in generations:
            yield Variant(generation, generation)
    if "v3" in generations:
        for steps in steps_per_launch:
            yield Variant("one launch" if steps == 1 else f"loop of {steps}", "v3", steps)


@dataclass
class Steps:
    """Steps as the host saw them.

    Attributes:
        ms: Milliseconds per step of each round.
        intervals_ms: Milliseconds between two steps; 0 for steps that the host received together.
        tokens: New tokens of all requests.
        drafted_lengths: Steps of all requests by the number of drafts that they verified.
        seconds: Times of plain decoding and of the steps; see ``EngineStats``.
    """

    ms: list[float] = field(default_factory=list)
    intervals_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted_lengths: Counter[int] = field(default_factory=Counter)
    seconds: tuple[float, float] = 0.0, 0.0

    @property
    def ms_per_step(self) -> float:
        """The median of the rounds."""
        return median(self.ms)

    @property
    def tokens_per_step(self) -> float:
        """Mean new tokens of all requests together."""
        return self.tokens / len(self.intervals_ms)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests at the median time per step."""
        return self.tokens_per_step / self.ms_per_step * 1e3

    def latency_ms(self, percentile: float) -> float:
        """Return a percentile of the intervals."""
        return float(np.percentile(self.intervals_ms, percentile))


class MeasuredEngine:
    """An engine whose batch is full of requests that do not end. Captures it and warms it up.

    Each measurement starts the requests again. The n-th steps of all variants are therefore at the
    same place of the same texts, if prompts and warm-ups are equal. The caller closes the
    engine. There are at least ``variant.steps_in_flight`` steps of warm-up.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        variant: Variant,
        prompts: Sequence[Sequence[int]],
        warm_up_steps: int,
    ) -> None:
        self._engine, self._variant = engine, variant
        self._prompts, self._warm_up_steps = prompts, warm_up_steps
        self._requests: list[Request] = []
        engine.capture()
        self._restart()

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens of each request so far."""
        return [request.output_ids for request in self._requests]

    def run(self, steps: int, into: Steps) -> None:
        """Run a round: at least ``steps`` steps, whole launches.

        No counted step begins before the clock starts: the host waits for the steps that are
        enqueued, starts the clock, and launches the first counted steps before it reads these. A
        host that is late, at the first or the last step, therefore only adds to the time.

        Raises:
            ConfigError: A request ended, because it reached the context limit of the engine.
        """
        self._restart()
        self._engine.runners[0].backend.wait_for_device()
        drafted, before_s = self._drafted_lengths(), self._seconds()
        began = time.perf_counter()
        self._advance(self._variant.steps_ahead)
        tokens = sum(map(len, self.outputs))
        seen = [began, *self._advance(steps)[1:]]
        into.ms.append((seen[-1] - seen[0]) / (len(seen) - 1) * 1e3)
        into.intervals_ms += [(after - before) * 1e3 for before, after in pairwise(seen)]
        into.tokens += sum(map(len, self.outputs)) - tokens
        into.drafted_lengths += self._drafted_lengths() - drafted
        spent = zip(into.seconds, self._seconds(), before_s, strict=True)
        plain, taken = (total + after - before for total, after, before in spent)
        into.seconds = plain, taken

    def bare_step(self) -> BareStep:
        """Return the step of the requests without the engine, which must not run afterwards.

        Its requests start again, so that attention reads as many keys as in a round.
        """
        self._restart()
        self._engine.runners[0].backend.wait_for_device()
        return BareStep(self._runner(), self._rows())

    def _seconds(self) -> tuple[float, float]:
        """Return times of plain decoding and of all steps so far."""
        stats = self._engine.stats
        return stats.plain_seconds, stats.step_seconds

    def _drafted_lengths(self) -> Counter[int]:
        """Return the steps of all requests so far by the number of drafts that they verified."""
        counts = Counter[int]()
        for request in self._requests:
            counts.update(request.drafted_lengths)
        return counts

    def _advance(self, steps: int) -> list[float]:
        """Run at least ``steps`` steps of all requests, whole launches.

        Returns:
            When they began, and when each was received.
        """
        done, seen = self._steps(), [time.perf_counter()]
        end = done + self._variant.whole_launches(steps)
        while done < end and not self._requests[0].is_finished:
            self._engine.step()
            now, before, done = time.perf_counter(), done, self._steps()
            seen += [now] * (done - before)
        if any(request.is_finished for request in self._requests):
            raise ConfigError(
                f"a request reached its limit of {self._engine.context_limit} tokens after {done} "
                "steps. Measure fewer steps, or enlarge the context of the engine.",
                field="max_context_len",
            )
        return seen

    def _steps(self) -> int:
        """Return the steps of the request that began last."""
        return min(request.num_verifies for request in self._requests)

    def _restart(self) -> None:
        """Begin the requests, instead of those that run, and warm up.

        The last steps of the warm-up are enqueued and not read. They began when earlier ones had
        ended, as all later ones do.
        """
        for request in self._requests:
            self._engine.abort(request)
        sampling = SamplingParams(max_new_tokens=self._engine.context_limit)
        self._requests = [self._engine.submit(prompt, sampling) for prompt in self._prompts]
        self._advance(self._warm_up_steps - self._variant.steps_ahead)

    def _runner(self) -> SpecStepRunner:
        (runner,) = self._engine.runners
        assert isinstance(runner, SpecStepRunner), "v3 has no other runner"
        return runner

    def _rows(self) -> list[int]:
        return [request.row for request in self._requests]
