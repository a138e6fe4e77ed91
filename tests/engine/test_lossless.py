"""Greedy output equals the target's own greedy decoding, for every drafter."""

from __future__ import annotations

import pytest

from engine_runs import outputs

pytestmark = pytest.mark.slow

DRAFTING = ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"]
PADDED, EXACT = [3, 8], list(range(1, 9))
"""Captured sizes: most batches are padded, or each has a graph of its own size."""
REQUESTS = 20
"""Enough for prompts of each length from 1 to 19, and for all batch sizes from 1 to 8 but one."""


def accepted_counts(requests):
    return [(request.num_verifies, request.num_accepted_tokens) for request in requests]


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_eager_and_captured_give_the_plain_continuation(
    make_engine, run_in_waves, task, algorithm, topk, generation
):
    task = task.first(REQUESTS)
    sizes = EXACT if generation == "v2" and topk == 1 else PADDED
    engine = make_engine(algorithm, topk=topk, generation=generation, batch_sizes=sizes)
    eager = run_in_waves(engine, task)
    assert outputs(eager) == task.expected
    engine.capture()
    before = engine.stats
    graphed = run_in_waves(engine, task)
    assert outputs(graphed) == task.expected
    assert accepted_counts(graphed) == accepted_counts(eager)
    assert engine.stats.fallbacks == before.fallbacks, "a batch ran eagerly"
    for runner in engine.runners:
        replayed = runner.stats.replays_by_size.keys()
        assert len(replayed ^ set(sizes)) <= len(sizes) // 8, runner.mode
