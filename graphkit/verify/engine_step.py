"""The engine of a target, whose whole step is its STEP, and requests for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from graphkit.engine import SpeculativeEngine
from graphkit.errors import GraphkitError, TargetError
from graphkit.graphs import Backend
from graphkit.graphs.capture_failure import describe_exception
from graphkit.step import SamplingParams, SpecStepRunner
from graphkit.targets import CaptureTarget
from graphkit.verify.request_runs import Requests

_SEED = 40
_LONGEST_PROMPT = 13
MOST_NEW_TOKENS = 64
"""Most new tokens of a request."""


@contextmanager
def open_engine(
    target: CaptureTarget,
    *,
    batch_sizes: Sequence[int] | None = None,
    device: torch.device | str = "auto",
    backend: Backend | None = None,
) -> Iterator[SpeculativeEngine]:
    """Create the engine of a target for a block, and close it after it.

    Args:
        target: Has an ``engine``.
        batch_sizes: Sizes to capture; ``None`` selects the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: As for ``Runner``.

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
        yield engine


def step_runner(engine: SpeculativeEngine) -> SpecStepRunner | None:
    """Return the runner of an engine's whole step; ``None`` if it runs several runners."""
    runner = engine.runners[0]
    return runner if isinstance(runner, SpecStepRunner) else None


def step_refusal(engine: SpeculativeEngine) -> str:
    """Return why the engine has no runner of its whole step, as a phrase."""
    return f"the engine runs generation {engine.generation}, {engine.plan.reason}"


def allocate_rows(target: CaptureTarget, engine: SpeculativeEngine) -> list[int]:
    """Return a row with KV slots for each request of the largest batch. The engine runs none.

    Raises:
        TargetError: The engine's pools have no room for them.
    """
    memory, count = engine.memory, engine.sizes.max_batch_size
    ahead = engine.sizes.max_context_len - engine.context_limit
    tokens, rows = _most_tokens(engine) + ahead, list[int]()
    while len(rows) < count and memory.has_room(tokens):
        rows.append(memory.allocate_row(tokens))
    if len(rows) < count:
        raise TargetError(
            f"target {target.name!r}: the pools of its engine hold {len(rows)} requests of "
            f"{tokens} tokens, and checks of STEP need {count}. Enlarge the pools."
        )
    memory.reserve((row, tokens) for row in rows)
    return rows


def random_requests(
    engine: SpeculativeEngine,
    rows: Sequence[int],
    new_tokens: Callable[[int], int],
    *,
    is_greedy: bool = False,
) -> Requests:
    """Return random prompts and sampling parameters for some rows, the same for the same rows.

    Args:
        engine: The rows are from ``allocate_rows`` of it.
        rows: Rows of the requests.
        new_tokens: Returns the most new tokens of the request of an index.
        is_greedy: If False, every second request has a temperature.
    """
    random, most = np.random.default_rng(_SEED), _most_tokens(engine)
    requests = {}
    for index, row in enumerate(rows):
        length = min(1 + 3 * index % _LONGEST_PROMPT, most - 1)
        prompt = random.integers(0, engine.sizes.vocab_size, length).tolist()
        requests[row] = (
            prompt,
            SamplingParams(
                max_new_tokens=min(new_tokens(index), most - length),
                temperature=0.0 if is_greedy or index % 2 else 0.8,
                seed=index,
            ),
        )
    return requests


def _most_tokens(engine: SpeculativeEngine) -> int:
    return min(engine.context_limit, _LONGEST_PROMPT + MOST_NEW_TOKENS)
