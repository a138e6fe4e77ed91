"""Engines whose steps ``step.py`` measures, and what it measures of one engine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from step_clocks import device_ms, synchronise, waits

import graphkit as gk
from graphkit.reference import reference_engine

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "v1": {"generation": "v1"},
    "v2": {"generation": "v2"},
    "one launch": {"generation": "v3", "steps_per_launch": 1},
    "loop of 4": {"generation": "v3", "steps_per_launch": 4},
    "loop of 16": {"generation": "v3", "steps_per_launch": 16},
    "loop of 64": {"generation": "v3", "steps_per_launch": 64},
}
"""Options of ``reference_engine`` by the name of a variant."""
WARM_UP_STEPS = 64
CONTEXT = 4096
_PROMPT = 64
_MIN_LAUNCHES = 12


@dataclass(frozen=True)
class Setting:
    """Batch size and shape of the draft."""

    batch_size: int
    topk: int

    def __str__(self) -> str:
        return f"{'chain' if self.topk == 1 else f'tree of topk {self.topk}'}, {self.batch_size}"


@dataclass
class Steps:
    """Steps as the host saw them.

    Attributes:
        ms: Milliseconds per step of each round.
        intervals_ms: Milliseconds between two steps; 0 for steps that the host received together.
        tokens: New tokens of all requests.
    """

    ms: list[float] = field(default_factory=list)
    intervals_ms: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ms_per_step(self) -> float:
        """The median of the rounds."""
        return median(self.ms)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests at the median time per step."""
        return self.tokens / len(self.intervals_ms) / self.ms_per_step * 1e3

    def latency_ms(self, percentile: float) -> float:
        """Return a percentile of the intervals."""
        return float(np.percentile(self.intervals_ms, percentile))


class MeasuredEngine:
    """A captured engine with a full batch of long requests, warmed up.

    The n-th steps of all variants of a setting are at the same place of the same texts.

    Args:
        setting: Batch size and draft.
        options: Those of a variant.
        device: ``cuda`` or ``cpu``.
        attribution: Records the origin of each node of the whole step; for v3 only.
    """

    def __init__(
        self,
        setting: Setting,
        options: Mapping[str, Any],
        device: torch.device,
        attribution: gk.Attribution | None = None,
    ) -> None:
        size = setting.batch_size
        self._device, self._steps_per_launch = device, options.get("steps_per_launch", 1)
        self._engine = engine = reference_engine(
            topk=setting.topk, max_batch_size=size, batch_sizes=[size], max_context_len=CONTEXT,
            device=device, **options,
        )  # fmt: skip
        if attribution is not None:
            engine.runners[0].capture(attribution=attribution)
        engine.capture()
        sampling = gk.SamplingParams(max_new_tokens=CONTEXT)
        self._requests = [engine.submit(prompt, sampling) for prompt in prompts(size)]
        self.run(WARM_UP_STEPS, Steps())

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens of each request so far."""
        return [request.output_ids for request in self._requests]

    def run(self, steps: int, into: Steps) -> None:
        """Run a round from an idle device: at least ``steps`` steps, whole launches."""
        first, tokens = self._requests[0], sum(map(len, self.outputs))
        done, count = first.num_verifies, self._steps_per_launch
        end = done + -(-steps // count) * count
        synchronise(self._device)
        seen = [time.perf_counter()]
        while done < end:
            self._engine.step()
            now = time.perf_counter()
            seen += [now] * (first.num_verifies - done)
            done = first.num_verifies
        if any(request.is_finished for request in self._requests):
            raise RuntimeError(f"a request ended within {done} steps: measure fewer steps")
        into.ms.append((seen[-1] - seen[0]) / (len(seen) - 1) * 1e3)
        into.intervals_ms += [(after - before) * 1e3 for before, after in pairwise(seen)]
        into.tokens += sum(map(len, self.outputs)) - tokens

    def host_us(self, steps: int) -> dict[str, float]:
        """Return microseconds of CPU time of the host's thread per step, without its waits.

        In v3, these are the launch, and the reading of steps that are done. The engine must not
        run afterwards: it does not know the steps.
        """
        if self._engine.generation == "v3":
            launching, reading = self._launch_and_reading_us(steps)
            return {
                "host": launching + reading, "host, launch": launching, "host, reading": reading
            }  # fmt: skip
        with waits() as seconds:
            began, result = time.thread_time(), Steps()
            self.run(steps, result)
            busy = time.thread_time() - began - sum(seconds)
        return {"host": busy / len(result.intervals_ms) * 1e6}

    def bare_ms(self, steps: int) -> float:
        """Return the device's milliseconds per replay of the whole step, back to back.

        As for ``host_us``, the engine must not run afterwards.
        """
        runner, batch = self._engine.runners[0], gk.SpecStepInputs(req_pool_indices=self._rows())
        synchronise(self._device)
        with device_ms(self._device) as ms:
            for _ in range(steps):
                runner.replay(batch)
        return ms[0] / steps

    def nodes(self) -> dict[str, int]:
        """Return the number of nodes of the whole step: all, and graphkit's own.

        Own nodes are outside of the models' modules. They are also counted by phase.
        """
        (graph,) = self._engine.runners[0].graphs.values()
        own = [each for each in graph.origins if not each.module or each.module.startswith("(")]
        phases = [each.scope.partition("/")[0] or "rest" for each in own]
        by_phase = {f"own nodes, {name}": phases.count(name) for name in dict.fromkeys(phases)}
        return {"nodes": graph.num_nodes, "own nodes": len(own), **by_phase}

    def _launch_and_reading_us(self, steps: int) -> tuple[float, float]:
        runner, rows, count = self._engine.runners[0], self._rows(), self._steps_per_launch
        launching, reading = [], []
        for _ in range(max(_MIN_LAUNCHES, steps // count)):
            synchronise(self._device)
            began = time.thread_time()
            stream = runner.launch(rows, max_steps=count)
            launched = time.thread_time()
            synchronise(self._device)
            ready = time.thread_time()
            for _ in stream:
                pass
            read = time.thread_time()
            launching.append((launched - began) / count * 1e6)
            reading.append((read - ready) / count * 1e6)
        return median(launching), median(reading)

    def _rows(self) -> np.ndarray:
        return np.array([request.row for request in self._requests])


def prompts(count: int) -> list[list[int]]:
    """Return different pieces of Python source, as bytes."""
    source = Path(argparse.__file__).read_bytes()
    starts = range(0, len(source) - _PROMPT, (len(source) - _PROMPT) // count)
    return [list(source[start : start + _PROMPT]) for start in starts[:count]]
