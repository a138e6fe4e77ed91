"""An engine over shared models, with room for all steps that a benchmark runs; its prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphkit.cli.benchmarks.measured_engine import MeasuredEngine
from graphkit.cli.benchmarks.variants import Variant
from graphkit.engine import SpeculativeEngine
from graphkit.spec import SpecConfig


@contextmanager
def open_engine(
    engine: Callable[..., SpeculativeEngine],
    spec: SpecConfig,
    variant: Variant,
    prompts: Sequence[Sequence[int]],
    *,
    warm_up_steps: int,
    most_steps: int,
) -> Iterator[MeasuredEngine]:
    """Open an engine for a block, with KV pools of its own.

    Args:
        engine: Creates the engine, as for ``StepBench``.
        spec: Settings of its drafts.
        variant: How the engine runs its steps.
        prompts: Token ids of each request, all of the same length.
        warm_up_steps: As for ``MeasuredEngine``.
        most_steps: Steps for which the context has room, warm-up included.
    """
    with engine(
        max_batch_size=len(prompts),
        batch_sizes=[len(prompts)],
        max_context_len=len(prompts[0]) + room_for(most_steps, spec),
        generation=variant.generation,
        steps_per_launch=variant.steps_per_launch,
    ) as opened:
        yield MeasuredEngine(opened, variant, prompts, warm_up_steps)


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

    Args:
        ids: Token ids of the text, at least one; a text that is too short is repeated.
        count: Number of pieces.
        length: Tokens of each piece.
    """
    text = list(ids) * -(-(length + count) // len(ids))
    distance = (len(text) - length) // count
    return [text[start : start + length] for start in range(0, count * distance, distance)]
