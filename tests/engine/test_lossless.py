"""Greedy output equals the target's own greedy decoding, for every drafter."""

from __future__ import annotations

import pytest

DRAFTING = ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"]
LIVE = set(range(1, 9))
CAPTURED = {"v1": [3, 8], "v2": None}
"""Captured sizes: v1 pads most batches, v2 has a graph of every size."""
REQUESTS = 28
"""The first 8 fill the batch; the others have prompts of each length from 1 to 19."""


def accepted_counts(requests):
    return [(request.num_verifies, request.num_accepted_tokens) for request in requests]


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_eager_and_captured_give_the_plain_continuation(
    make_engine, run_in_waves, task, algorithm, topk, generation
):
    task = task.first(REQUESTS)
    engine = make_engine(
        algorithm, topk=topk, generation=generation, batch_sizes=CAPTURED[generation]
    )
    eager = run_in_waves(engine, task)
    assert [request.output_ids for request in eager] == task.expected
    engine.capture()
    before = engine.stats
    graphed = run_in_waves(engine, task)
    assert [request.output_ids for request in graphed] == task.expected
    assert accepted_counts(graphed) == accepted_counts(eager)
    assert engine.stats.fallbacks == before.fallbacks, "a batch ran eagerly"
    for runner in engine.runners:
        sizes = set(runner.stats.replays_by_size)
        assert sizes == set(CAPTURED[generation] or LIVE), runner.mode
