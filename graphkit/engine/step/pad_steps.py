"""Steps of pads: they compile the kernels of steps, and their graphs are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product

import torch

from graphkit.engine.step.spec_step import SpecStep, StepVariant
from graphkit.graphs import Backend, CaptureFailure
from graphkit.graphs.compiles import compile_ahead
from graphkit.runners.capture import capture_error


def warm_up(step: SpecStep, backend: Backend, functions: Iterable[Callable[[], object]]) -> None:
    """Run functions without a graph, so that what they need exists and is compiled.

    Kernels are compiled in parallel; see ``compile_ahead``.

    Args:
        step: The step that they are parts of.
        backend: Backend of the graphs that are captured next.
        functions: What to run. The first one is to need most of the memory and of the kernels.

    Raises:
        CaptureError: A function raised an exception.
    """
    try:
        with backend.session(), torch.no_grad():
            for function in compile_ahead(backend, functions):
                backend.warm_up(function)
    except CaptureFailure as failure:
        raise capture_error(step.verifier.runner.mode, 1, failure) from failure.__cause__


def warm_up_steps(step: SpecStep, backend: Backend) -> None:
    """Run steps of pads, greedy and sampled, so that their kernels are compiled.

    Waits for the device. Does not count in the statistics of the runners.
    """
    sizes = {1, min(2, step.context.sizes.max_batch_size)}
    with _without_stats(step):
        steps = product(sorted(sizes), (True, False), step.variants)
        warm_up(step, backend, [_pad_step(step, *each) for each in steps])


def measure_steps(step: SpecStep, backend: Backend) -> list[list[float]]:
    """Return the time of the graphs that a greedy step of pads replays.

    Waits for the device. Does not count in the statistics of the runners.

    Returns:
        The times by captured size, then by variant.
    """
    with _without_stats(step):
        return [
            [_graph_time(step, backend, size, variant) for variant in step.variants]
            for size in step.verifier.runner.table
        ]


def _graph_time(step: SpecStep, backend: Backend, size: int, variant: StepVariant) -> float:
    run = _pad_step(step, size, True, variant)
    warm_up(step, backend, [run])
    before = [Counter(runner.stats.replays_by_size) for runner in step.runners]
    run()
    total = 0.0
    for replays, runner in zip(before, step.runners, strict=True):
        for replayed, count in (Counter(runner.stats.replays_by_size) - replays).items():
            with runner.buffers.replays_of_pads():
                total += count * backend.measure(runner.graphs[replayed])
    return total


def _pad_step(
    step: SpecStep, batch_size: int, is_greedy: bool, variant: StepVariant
) -> Callable[[], object]:
    pads = torch.zeros(batch_size, dtype=torch.int64, device=step.context.device)
    return partial(step.run, pads, is_greedy=is_greedy, variant=variant)


@contextmanager
def _without_stats(step: SpecStep) -> Iterator[None]:
    with ExitStack() as stack:
        for runner in step.runners:
            stack.enter_context(runner.without_stats())
        yield
