"""Every algorithm gives the tokens of plain decoding in every generation."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import graphkit as gk
from engine_runs import outputs

pytestmark = pytest.mark.slow

ALGORITHMS = ["EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM", "custom"]
SETTINGS = [
    ("NONE", 1, 16),
    ("EAGLE", 1, 16),
    ("EAGLE", 2, 1),
    *((algorithm, topk, {1: 1, 2: 16}[topk]) for algorithm in ALGORITHMS for topk in (1, 2)),
]
"""Algorithm, topk and page size."""
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "tools/examples/custom_algorithm.py"))
WIDTH = 6


class CopyTree(EXAMPLE["CopyDrafter"]):
    """Drafts a copied chain, and in the last node another candidate for its first token."""

    def prepare(self, context):
        super().prepare(context)
        children, siblings = [*range(1, WIDTH - 1), -1, -1], [-1] * WIDTH
        siblings[1] = WIDTH - 1
        mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
        mask[-1, 1:-1] = False
        self.links = torch.tensor([children, siblings], device=context.device)
        self.mask = mask.to(context.device)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tree, requests = super().draft(req_pool_indices, seq_lens, bonus_tokens), len(seq_lens)
        tokens = tree.draft_tokens.view(requests, WIDTH)
        tokens[:, -1] = (tokens[:, 1] + 1) % 96
        children, siblings = self.links.unbind()
        return replace(
            tree,
            tree_mask=self.mask.repeat(requests, 1, 1),
            retrieve_next_token=children.repeat(requests, 1),
            retrieve_next_sibling=siblings.repeat(requests, 1),
        )


def settings_of(algorithm, topk):
    """Return the arguments of ``make_engine``."""
    if algorithm != "custom":
        return {"algorithm": algorithm, "topk": topk}
    drafter = CopyTree() if topk > 1 else EXAMPLE["CopyDrafter"]()
    return {
        "algorithm": EXAMPLE["CopyAlgorithm"]("COPYING"),
        "topk": topk,
        "num_draft_tokens": WIDTH - 1,
        "drafter": lambda _: drafter,
    }


@pytest.fixture
def some(task):
    """Four long requests, and two short ones that join later."""
    mixed = slice(4, 10)
    return replace(
        task,
        prompts=task.prompts[mixed],
        counts=task.counts[mixed],
        expected=task.expected[mixed],
    )


@pytest.mark.parametrize(("algorithm", "topk", "page_size"), SETTINGS)
def test_output_is_that_of_plain_decoding(
    make_engine, some, run_in_waves, monkeypatch, algorithm, topk, page_size
):
    """Requests join and end in the middle, in v3 also in the middle of a launch."""
    options = {"page_size": page_size, "max_batch_size": 3, "batch_sizes": [1, 3]}

    def check(engine, *setting):
        requests = run_in_waves(engine, some)
        assert outputs(requests) == some.expected, setting

    for generation in ("v1", "v2"):
        engine = make_engine(**settings_of(algorithm, topk), **options, generation=generation)
        check(engine, generation)
    engine = make_engine(
        **settings_of(algorithm, topk), **options, generation="v3", steps_per_launch=64
    )
    engine.capture()
    # How many steps a launch runs is the same for all algorithms.
    for steps_per_launch in (1, 3, 64) if algorithm == "EAGLE" else (3,):
        monkeypatch.setattr(engine._batching.slots, "steps_at_once", steps_per_launch)
        check(engine, "v3", steps_per_launch)
    (replays,) = engine.stats.replays.values()
    assert replays > 0
    assert engine.stats.fallbacks == {}


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE"])
def test_engines_built_or_used_under_inference_mode(make_engine, task, algorithm, generation):
    """Nothing that outlives a call is an inference tensor."""
    some = task.first(3)
    sizes = {"max_batch_size": 2, "batch_sizes": [2], "generation": generation, "topk": 2}

    def check(engine):
        requests = engine.generate(some.prompts, gk.SamplingParams(max_new_tokens=4))
        assert outputs(requests) == [text[:4] for text in some.expected]

    with torch.inference_mode():
        built = make_engine(algorithm, **sizes)
    check(built)
    used = make_engine(algorithm, **sizes)
    with torch.inference_mode():
        check(used)
    for engine in (built, used):
        engine.capture()
        with torch.inference_mode():
            check(engine)
        check(engine)


def test_pools_of_others_that_are_inference_tensors_are_refused(make_engine):
    with torch.inference_mode(), pytest.raises(gk.ConfigError, match="created under torch"):
        make_engine("NGRAM", has_own_attention=True)
