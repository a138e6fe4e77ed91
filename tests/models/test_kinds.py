"""Models of transformers that differ in kind generate through graphkit what they generate alone."""

from __future__ import annotations

import os

import pytest
import torch

import graphkit as gk
from graphkit import models
from small_models import DIFFERENT_KINDS, KINDS, small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14
ALL = "GRAPHKIT_ALL_MODELS" in os.environ  # `make models`


@pytest.fixture(scope="module", params=KINDS if ALL else (*DIFFERENT_KINDS, "deepseek_v32"))
def loaded(request):
    return models.load(small_model(request.param), device="cpu")


def expected(model, prompt, **options):
    ids = model.original.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        do_sample=False,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_the_text_is_that_of_transformers(loaded, algorithm):
    with loaded.engine(
        algorithm=algorithm, max_batch_size=4, max_context_len=64, generation="v1"
    ) as engine:
        requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.output_ids == expected(loaded, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_captured_loops_give_the_text_of_transformers(loaded, topk):
    with loaded.engine(
        num_steps=3,
        topk=topk,
        max_batch_size=4,
        max_context_len=64,
        batch_sizes=[4],
        generation="v3",
    ) as engine:
        engine.capture()
        requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.output_ids == expected(loaded, prompt)


@pytest.mark.slow
def test_a_seeded_text_is_that_of_plain_decoding(loaded):
    sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3)
    texts = []
    for algorithm in ("NONE", "NGRAM"):
        with loaded.engine(algorithm=algorithm, max_batch_size=4, max_context_len=64) as engine:
            requests = engine.generate(PROMPTS, sampling)
            texts.append([request.output_ids for request in requests])
    assert texts[0] == texts[1]
