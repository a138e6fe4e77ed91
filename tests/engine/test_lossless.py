"""Whatever drafts, and however: what comes out is the target's own greedy decoding."""

from __future__ import annotations

import pytest

DRAFTING = ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"]
SIZES = set(range(1, 9))


def accepted(requests):
    return [(request.num_verifies, request.num_accepted_tokens) for request in requests]


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", DRAFTING)
def test_eager_and_captured_give_the_plain_continuation(
    make_engine, run_in_waves, task, algorithm, topk, generation
):
    engine = make_engine(algorithm, topk=topk, generation=generation)
    eager = run_in_waves(engine, task)
    assert [request.output_ids for request in eager] == task.expected
    engine.capture()
    before = engine.stats
    graphed = run_in_waves(engine, task)
    assert [request.output_ids for request in graphed] == task.expected
    assert accepted(graphed) == accepted(eager)
    assert engine.stats.fallbacks == before.fallbacks, "a batch found no graph"
    for runner in engine.runners:
        assert set(runner.stats.replays_by_size) == SIZES, runner.mode
