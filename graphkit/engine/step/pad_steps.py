"""Steps without requests: they compile the kernels of steps, and their graphs are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Self

import torch

from graphkit.engine.step.spec_step import SpecStep, StepVariant
from graphkit.graphs import Backend, CaptureFailure
from graphkit.graphs.compiles import compile_ahead
from graphkit.runners.capture import capture_error


def warm_up(step: SpecStep, backend: Backend, functions: Iterable[Callable[[], object]]) -> None:
    """Run functions without a graph, so that what they need exists and is compiled.

    Kernels are compiled in parallel. If there were any, the first function runs again after that,
    and in any case those run that the pass over all did not reach.

    Args:
        step: The step that they are parts of.
        backend: Backend of the graphs that are captured next.
        functions: What to run. The first one is to need most of the memory and of the kernels.

    Raises:
        CaptureError: A function raised an exception.
    """
    functions, passed = [*functions], list[Callable[[], object]]()

    def run(function: Callable[[], object]) -> None:
        function()
        passed.append(function)

    try:
        with backend.session(), torch.no_grad():
            compiled = compile_ahead(backend, [partial(run, function) for function in functions])
            # Without a compile, what has run was a warm-up.
            again = functions[:1] if compiled and passed else []
            for function in [*again, *functions[len(passed) :]]:
                backend.warm_up(function)
    except CaptureFailure as failure:
        raise capture_error(step.verifier.runner.mode, 1, failure) from failure.__cause__


def warm_up_steps(step: SpecStep, backend: Backend) -> None:
    """Run steps of pads, greedy and sampled, so that their kernels are compiled.

    Waits for the device. Does not count in the statistics of the runners.

    Raises:
        CaptureError: The step raised an exception.
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


class FreeRows:
    """Rows and a page that no request has, which run as live rows while graphs are measured.

    Pads choose no expert, so that a step of pads takes less time than one of requests. All rows
    write the same page, which requests write before they read it. If ``req_to_token`` names too
    many rows or pages, and in the checking mode, which refuses a slot of several rows, pads run.

    Args:
        step: The step that is measured. The device must be idle.
        count: Most rows.
    """

    def __init__(self, step: SpecStep, count: int) -> None:
        context, self._step = step.context, step
        table, page_size = context.req_to_token, context.sizes.page_size
        columns = min(context.sizes.max_context_len, table.shape[1])
        self._most_tokens = columns - step.slots_ahead - step.max_path - 1
        named = set((table // page_size).unique().tolist())
        pages = (page for page in range(1, context.kv_slots // page_size + 1) if page not in named)
        page = next(pages, 0)
        is_used = (table != 0).any(1) | (step.state.remaining > 0)
        rows = (~is_used)[1:].nonzero()[:count, 0] + 1
        if context.is_checking or not page or self._most_tokens < 1 or len(rows) < count:
            rows = rows[:0]
        self.rows = torch.nn.functional.pad(rows, (0, count - len(rows)))
        self._live = rows
        offsets = torch.arange(table.shape[1], device=table.device) % page_size
        self._slots = (page * page_size + offsets).to(table.dtype)

    def __enter__(self) -> Self:
        state = self._step.state
        names = ("seq_lens", "bonus_tokens", "remaining", "stop_ids")
        self._saved = {name: getattr(state, name)[self._live] for name in names}
        self._step.context.req_to_token[self._live] = self._slots
        return self

    def __exit__(self, *exc: object) -> None:
        self.begin()
        for name, values in self._saved.items():
            getattr(self._step.state, name)[self._live] = values
        self._step.context.req_to_token[self._live] = 0

    def begin(self) -> None:
        """Let each row begin with one committed token, and a newest token of its own."""
        state, rows, context = self._step.state, self._live, self._step.context
        state.seq_lens[rows] = 1
        state.bonus_tokens[rows] = rows % context.sizes.vocab_size
        state.remaining[rows] = self._most_tokens
        state.stop_ids[rows] = -1
        for counts in (state.behind, state.acceptance):
            if counts is not None:
                counts[rows] = 0
        if (recurrent := self._step.verifier.recurrent_state) is not None:
            recurrent.reset(rows)


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
