"""The step of a target's engine, and its comparison with the same step without a graph.

Captures, audits and the kit for tests all open, fill and compare it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch

from graphkit.audit.runs.equal_state_runs import Comparison, EqualStateRuns, located
from graphkit.audit.runs.request_runs import RequestRuns, request_state, step_batch
from graphkit.engine import SpeculativeEngine
from graphkit.engine.step import SamplingParams, SpecStepInputs, SpecStepRunner
from graphkit.errors import GraphkitError, TargetError
from graphkit.graphs import Attribution, Backend
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import Mismatch
from graphkit.runners.comparison import GRAPH_DIFFERS
from graphkit.runners.comparison.differences import Rounding, Tensors, largest_difference
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget

LOOP_DIFFERS = "a launch of several steps differs from single replays"
"""Kind of a mismatch between a loop and replays."""
LOOP_STEPS = 8
"""Most steps of a launch that is compared with the same steps one by one."""
_LONGEST_PROMPT = 13
_MOST_NEW_TOKENS = 64


class EngineStep:
    """The step of a target's engine, with random requests to run it on.

    Attributes:
        eager_reason: Reason why the step has no graph, or an empty string.
    """

    def __init__(self, target: CaptureTarget, engine: SpeculativeEngine) -> None:
        self._target, self._engine = target, engine
        self._runner = runner = engine.runners[0]
        self.eager_reason = ""
        if not isinstance(runner, SpecStepRunner):
            self.eager_reason = (
                f"the engine runs generation {engine.generation}, {engine.plan.reason}"
            )

    @property
    def runner(self) -> SpecStepRunner:
        """The runner of the step; there is one unless ``eager_reason`` says why not."""
        assert isinstance(self._runner, SpecStepRunner), self.eager_reason
        return self._runner

    def capture(self) -> None:
        """Capture the step, if it has graphs, and attribute their nodes.

        Raises:
            CaptureError: The step cannot be captured.
        """
        if not self.eager_reason:
            self.runner.capture(attribution=Attribution(self._target.weights))

    @cached_property
    def rows(self) -> list[int]:
        """A row with KV slots for each request of the largest batch.

        Raises:
            TargetError: The engine's pools have no room for them.
        """
        memory, count = self._engine.memory, self._engine.sizes.max_batch_size
        ahead = self._engine.sizes.max_context_len - self._engine.context_limit
        tokens, rows = self._most_tokens + ahead, list[int]()
        while len(rows) < count and memory.available_rows and memory.can_promise(tokens):
            rows.append(memory.allocate_row(tokens))
        if len(rows) < count:
            raise TargetError(
                f"target {self._target.name!r}: the pools of its engine hold {len(rows)} requests "
                f"of {tokens} tokens, and checks of STEP need {count}. Enlarge the pools."
            )
        memory.reserve((row, tokens) for row in rows)
        return rows

    def batch(self, live: int) -> SpecStepInputs:
        """Return the inputs of a step for the first requests."""
        return step_batch(self.rows[:live])

    def runs(
        self, count: int | None = None, *, is_staggered: bool = False, is_greedy: bool = False
    ) -> RequestRuns:
        """Return runs of random requests, the same for the same count.

        Args:
            count: Number of requests; ``None`` selects the largest batch.
            is_staggered: Whether requests end after different steps, so that a loop changes its
                size.
            is_greedy: If False, every second request has a temperature.
        """
        random, most = np.random.default_rng(SEED), self._most_tokens
        requests = {}
        for index, row in enumerate(self.rows[:count]):
            # Steps of 3 and of 5 give neighbours different lengths, over the whole range.
            length = min(1 + 3 * index % _LONGEST_PROMPT, most - 1)
            new_tokens = 2 + 5 * index % 23 if is_staggered else _MOST_NEW_TOKENS
            sampling = SamplingParams(
                max_new_tokens=min(new_tokens, most - length),
                temperature=0.0 if is_greedy or index % 2 else 0.8,
                seed=index,
                repetition_penalty=1.0 if index % 3 else 1.2,
                frequency_penalty=0.5 * (index % 5 == 1),
            )
            prompt = random.integers(0, self._engine.sizes.vocab_size, length).tolist()
            requests[row] = prompt, sampling
        return RequestRuns(self.runner, requests)

    @property
    def _most_tokens(self) -> int:
        return min(self._engine.context_limit, _LONGEST_PROMPT + _MOST_NEW_TOKENS)


@contextmanager
def open_step(
    target: CaptureTarget,
    *,
    batch_sizes: Sequence[int] | None = None,
    device: torch.device | str = "auto",
    backend: Backend | None = None,
) -> Iterator[EngineStep]:
    """Create the engine of a target for a block, and close it after it.

    The target has an ``engine``. Other arguments are those of ``capture_target``.

    Raises:
        TargetError: ``engine`` raised an error or returned something else, or the engine does not
            run the target's largest batch.
    """
    assert target.engine is not None, "STEP was selected, and has no forward"
    sizes = target.batch_sizes if batch_sizes is None else batch_sizes
    try:
        engine = target.engine(batch_sizes=sizes, device=device, backend=backend)
    except GraphkitError:
        raise
    except Exception as error:
        raise TargetError(
            f"target {target.name!r}: engine(batch_sizes={sizes!r}, device={str(device)!r}, "
            f"backend=...) failed: {describe_exception(error)}."
        ) from error
    if not isinstance(engine, SpeculativeEngine):
        raise TargetError(
            f"target {target.name!r}: engine returned a {type(engine).__name__}. Return a "
            "graphkit.SpeculativeEngine."
        )
    with engine:
        most, expected = engine.sizes.max_batch_size, target.sizes.max_batch_size
        if most != expected:
            raise TargetError(
                f"target {target.name!r}: its engine has max_batch_size {most}, but the target "
                f"has {expected}. Use the same BufferSizes.max_batch_size in both."
            )
        yield EngineStep(target, engine)


def compare_steps(
    runner: SpecStepRunner, batch: SpecStepInputs, padded_batch_size: int
) -> Comparison:
    """Replay a whole step, run it padded without its graph from the same state, and compare.

    Report and state of the requests must agree bit for bit; see ``EqualStateRuns``. The step is not
    run without padding: where two logits nearly tie, its kernels may choose another token. Restores
    state and random numbers.
    """
    step, rows = runner.spec_step, batch.req_pool_indices.tolist()
    lengths = runner.state.seq_lens[batch.req_pool_indices.to(runner.device)]
    positions = int(lengths.max()) + step.max_path

    def read_state() -> Tensors:
        runner.backend.wait_for_replays()
        return request_state(step, rows, positions)

    with EqualStateRuns(runner, batch, padded_batch_size, read_state=read_state) as runs:
        replayed, padded = runs.replay(), runs.padded()
        mismatch = runs.graph_difference(padded, replayed)
        if mismatch is not None:
            mismatch = runs.judge_graph(padded, replayed).wrong
    where = runner.mode.name, batch.batch_size, padded_batch_size
    mismatches = located({GRAPH_DIFFERS: mismatch}, *where)
    return Comparison(replayed, mismatches, largest_difference(padded, replayed))


def compare_loop(runs: RequestRuns) -> tuple[int, tuple[Mismatch, ...]]:
    """Run requests in one launch, and again in replays of single steps, and compare.

    Their reports must be equal, and their state up to rounding. The requests are admitted several
    times, and released.

    Returns:
        The number of steps, and the first difference, if there is one. Without any steps the
        replays were not repeatable, so that nothing could be compared.
    """
    runner, count = runs.runner, len(runs.requests)
    rounding = Rounding(runner.sizes.dtype)
    replayed, launched = runs.replayed(LOOP_STEPS), runs.launched(LOOP_STEPS, LOOP_STEPS)
    mismatches = replayed.differences(launched, rounding)
    is_repeatable = not mismatches or not replayed.differences(runs.replayed(LOOP_STEPS), rounding)
    runs.release()
    if not is_repeatable:
        return 0, ()
    mismatch = mismatches.get("reports") or next(iter(mismatches.values()), None)
    where = runner.mode.name, count, runner.table.fit(count)
    return len(launched.reports), located({LOOP_DIFFERS: mismatch}, *where)
