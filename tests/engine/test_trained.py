"""The shipped weights: lossless output, and accepted drafts on held-out source files."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path

import pytest
import torch

from graphkit.engine import SamplingParams
from graphkit.reference import default_checkpoint, full_logits, load_checkpoint, reference_engine

CORPUS = Path(__file__).parents[2] / "tools" / "training" / "corpus.py"
PROMPTS, PROMPT, NEW = 6, 96, 24


@pytest.fixture(scope="module")
def prompts():
    """Excerpts of files of the standard library that are held out of training."""
    root = Path(sysconfig.get_path("stdlib"))
    text = runpy.run_path(str(CORPUS))["read_corpus"](root, held_out=True)
    starts = torch.arange(1, PROMPTS + 1) * (len(text) // (PROMPTS + 2))
    return [text[start : start + PROMPT].tolist() for start in starts]


@pytest.fixture(scope="module")
def greedy_after(device):
    """``greedy_after(prompts, outputs)``: the target's best token before each output token."""
    model = load_checkpoint(default_checkpoint(), device=device, dtype=torch.float32)

    def predict(prompts, outputs):
        ids = torch.tensor([p + o for p, o in zip(prompts, outputs, strict=True)], device=device)
        return full_logits(model, ids)[:, PROMPT - 1 : -1].argmax(-1).tolist()

    return predict


def run(engine, prompts):
    """Generate eagerly, then captured; return both lists of requests and the statistics."""
    with engine:
        eager = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
        engine.capture()
        return eager, engine.generate(prompts, SamplingParams(max_new_tokens=NEW)), engine.stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "topk", "least"),
    [
        ("EAGLE", 1, 2.0),
        ("EAGLE", 2, 2.0),
        ("EAGLE3", 2, 2.0),
        ("MULTI_LAYER_EAGLE", 1, 2.0),
        ("STANDALONE", 2, 2.0),
        ("DFLASH", 1, 1.4),
    ],
)
def test_three_drafts_accept_several_tokens(prompts, greedy_after, device, algorithm, topk, least):
    engine = reference_engine(
        algorithm, topk=topk, num_steps=3, max_context_len=160, batch_sizes=[8], device=device
    )
    eager, captured, stats = run(engine, prompts)
    outputs = [request.output_ids for request in eager]
    assert {len(output) for output in outputs} == {NEW}
    assert greedy_after(prompts, outputs) == outputs
    assert [request.output_ids for request in captured] == outputs
    assert [r.accept_length for r in eager] == [r.accept_length for r in captured]
    assert stats.accept_length > least
