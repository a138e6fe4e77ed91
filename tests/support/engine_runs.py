"""What tests of engines share: settings that run in every generation, and complete runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import graphkit as gk

each_generation = pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
chain_and_tree = pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])


def outputs(requests: Sequence[gk.Request]) -> list[list[int]]:
    """Return the tokens of each request."""
    return [request.output_ids for request in requests]


def finish(engine: gk.SpeculativeEngine) -> None:
    """Run steps until no request is left."""
    while engine.has_work:
        engine.step()


def submit_all(
    engine: gk.SpeculativeEngine,
    prompts: Sequence[Sequence[int]],
    sampling: gk.SamplingParams | Sequence[gk.SamplingParams] | Callable[[int], gk.SamplingParams],
) -> list[gk.Request]:
    """Submit prompts, with the same parameters, or with those of each place."""
    if isinstance(sampling, gk.SamplingParams):
        return [engine.submit(prompt, sampling) for prompt in prompts]
    parameters = sampling if callable(sampling) else sampling.__getitem__
    return [engine.submit(prompt, parameters(i)) for i, prompt in enumerate(prompts)]


def run_all(engine: gk.SpeculativeEngine, *submitted: Any) -> list[gk.Request]:
    """Submit prompts as ``submit_all`` does, and run them to their ends."""
    requests = submit_all(engine, *submitted)
    finish(engine)
    return requests


@contextmanager
def refuses(
    error: type[Exception] | tuple[type[Exception], ...], field: Any, match: str | None = None
) -> Iterator[None]:
    """Expect an error with this field and message."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert getattr(caught.value, "field", None) == field
