"""The host's time and the CUDA calls of an engine's steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timing import counted_calls

from graphkit.cli.benchmarks import MeasuredEngine, synchronise

_HOST_RUNS, _MIN_LAUNCHES = 3, 12
"""Runs of v1 and v2, and least launches of v3, whose least host time is the result."""
_COUNTED_RUNS = 2


class HostMeasuredEngine(MeasuredEngine):
    """An engine of which the host's time is measured, too."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._host_us: dict[str, float] = {}

    def host_us(self, steps: int, *, launches: int = 0) -> dict[str, float]:
        """Return microseconds of CPU time of the host's thread per step, without its waits.

        The least of the runs of this call and of all earlier ones counts, because other processes
        of the host only add to it, some for seconds. In v3, these are the launch, and the reading
        of steps that are done.

        Args:
            steps: Least steps of a run.
            launches: Least launches of v3. The requests start again as often as the steps need
                it: no start runs more than ``host_time_steps``.
        """
        if self._variant.generation == "v3" and self._runner().can_launch:
            parts = self._launch_and_reading_us(steps, launches)
        else:
            self._restart()
            parts = {"host": min(self._host_us_of_a_run(steps) for _ in range(_HOST_RUNS))}
        least = self._host_us
        least |= {part: min(us, least.get(part, us)) for part, us in parts.items()}
        return {"host": sum(least.values())} | least

    def cuda_calls(self, steps: int) -> dict[str, float]:
        """Return the calls of the CUDA API per step, by name, in rounds of ``steps`` steps.

        Measure times before: the profiler slows later launches of the process.
        """
        self._restart()
        counted = counted_calls(lambda _: self._advance(steps), _COUNTED_RUNS)
        whole = self._variant.whole_launches(steps)
        return {name: count / whole for name, count in counted.items()}

    def _host_us_of_a_run(self, steps: int) -> float:
        with waits() as seconds:
            began = time.thread_time()
            seen = self._advance(steps)
            busy = time.thread_time() - began - sum(seconds)
        return busy / (len(seen) - 1) * 1e6

    def _launch_and_reading_us(self, steps: int, launches: int) -> dict[str, float]:
        runner, count = self._runner(), self._variant.steps_per_launch
        launches_per_start = host_time_steps(steps, count) // count
        launching, reading = [], []
        for number in range(max(launches, _num_launches(steps, count))):
            if number % launches_per_start == 0:
                self._restart()
            rows = self._rows()
            synchronise(self._engine.device)
            began = time.thread_time()
            stream = runner.launch(rows, max_steps=count)
            launched = time.thread_time()
            synchronise(self._engine.device)
            ready = time.thread_time()
            for _ in stream:
                pass
            read = time.thread_time()
            launching.append((launched - began) / count * 1e6)
            reading.append((read - ready) / count * 1e6)
        return {"host, launch": min(launching), "host, reading": min(reading)}


def host_time_steps(steps: int, steps_per_launch: int) -> int:
    """Return the most steps that ``MeasuredEngine.host_us`` runs after a start of the requests."""
    return max(_HOST_RUNS * steps, steps_per_launch * _num_launches(steps, steps_per_launch))


def _num_launches(steps: int, steps_per_launch: int) -> int:
    return max(_MIN_LAUNCHES, steps // steps_per_launch)


@contextmanager
def waits() -> Iterator[list[float]]:
    """Collect the CPU seconds that the thread spends in waits for events during a block.

    CUDA waits for an event in a busy loop.
    """
    seconds: list[float] = []
    wait = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        began = time.thread_time()
        wait(event)
        seconds.append(time.thread_time() - began)

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
