"""Models of transformers and their draft models on CUDA: captured text, and audits."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from drafted_models import CASES
from graphkit import models
from small_models import DIFFERENT_KINDS, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14


@pytest.fixture(scope="module", params=CASES)
def drafted(request, tmp_path_factory):
    return CASES[request.param](tmp_path_factory.mktemp("draft"), "cuda")


def check_text(loaded, topk, generation):
    """Compare captured text with that of transformers."""
    with loaded.engine(
        num_steps=3,
        topk=topk,
        max_batch_size=4,
        max_context_len=64,
        batch_sizes=[4],
        generation=generation,
    ) as engine:
        engine.capture()
        requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        ids = loaded.original.generate(
            torch.tensor([prompt], device="cuda"), max_new_tokens=NEW_TOKENS, eos_token_id=None,
            pad_token_id=0, do_sample=False,
        )  # fmt: skip
        assert request.output_ids == ids[0, len(prompt) :].tolist()


def errors(target, batch_sizes):
    report = gk.audit_target(target, batch_sizes=batch_sizes, device="cuda")
    return [finding.text for finding in report.findings if finding.severity == "error"]


@pytest.mark.parametrize("kind", [*DIFFERENT_KINDS, "deepseek_v32"])
def test_captured_loops_give_the_text_of_transformers(kind):
    loaded = models.load(small_model(kind), device="cuda")
    for topk in (1, 2):
        check_text(loaded, topk, "v3")


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_text_with_a_draft_model_is_that_of_transformers(drafted, generation, topk):
    check_text(drafted, topk, generation)


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_audits_of_a_sound_model_in_bfloat16_find_no_error(kind):
    loaded = models.load(small_model(kind), dtype=torch.bfloat16, device="cuda")
    assert errors(loaded.target(max_batch_size=4), [1, 2, 4]) == []


def test_audits_of_a_draft_model_find_no_error(drafted):
    assert errors(drafted.target(max_batch_size=4, max_context_len=64, topk=2), [4]) == []
