"""Tokens per counted work of adaptive drafts, against each fixed length and plain decoding."""

from __future__ import annotations

import pytest
import torch

from chance_models import VOCAB, ChanceDrafter, LayeredLogits
from graphkit.config import BufferSizes
from graphkit.engine import SamplingParams, SpeculativeEngine
from graphkit.graphs.recorded_graph import RecordedGraph
from graphkit.spec import SpecConfig
from table_models import table_model

pytestmark = pytest.mark.slow

LENGTHS = (0, 1, 3, 5)
TOKENS = {1: 1000, 8: 300, 64: 150}
"""New tokens of each request, by batch size."""


def tokens_per_work(num_steps, batch_size, chance, monkeypatch):
    """Return new tokens over the counted work of all graphs, and the steps by drafts."""
    new, work = TOKENS[batch_size], [0.0]
    is_plain = num_steps == 0
    width = 1 if is_plain else max(num_steps) + 1 if isinstance(num_steps, tuple) else num_steps + 1
    context_len = new + 32
    engine = SpeculativeEngine(
        table_model(LayeredLogits(), "cpu", batch_size, context_len),
        None if is_plain else ChanceDrafter(chance),
        spec=SpecConfig("NONE" if is_plain else "STANDALONE", num_steps, 1, width),
        sizes=BufferSizes(batch_size, context_len, 8, VOCAB, torch.float32),
        batch_sizes=[batch_size],
        device="cpu",
        steps_per_launch=32,
    )
    run = RecordedGraph.run

    def counted(graph):
        work[0] += graph.work
        run(graph)

    with engine, monkeypatch.context() as patch:
        engine.capture()
        patch.setattr(RecordedGraph, "run", counted)
        prompts = [[1 + row % (VOCAB - 1)] for row in range(batch_size)]
        engine.generate(prompts, SamplingParams(max_new_tokens=new))
        return engine.stats.new_tokens / work[0], engine.stats.drafted_lengths


@pytest.mark.parametrize("batch_size", TOKENS)
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
def test_adaptive_drafts_keep_up_with_the_best_fixed_length(batch_size, chance, monkeypatch):
    def measured(num_steps):
        return tokens_per_work(num_steps, batch_size, chance, monkeypatch)

    fixed = {steps: measured(steps)[0] for steps in LENGTHS}
    adaptive, drafted = measured(LENGTHS)
    best = max(fixed, key=fixed.get)
    assert adaptive >= 0.97 * fixed[best], (adaptive, fixed, drafted)
    assert adaptive >= 0.97 * fixed[0], (adaptive, fixed, drafted)
