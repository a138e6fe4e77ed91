"""Draft models of transformers targets on CUDA: captured text is that of the target."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from drafted_models import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory):
    return CASES[request.param](tmp_path_factory.mktemp("draft"), "cuda")


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_text_is_that_of_transformers(loaded, generation, topk):
    with loaded.engine(
        topk=topk, max_batch_size=4, max_context_len=64, batch_sizes=[4], generation=generation
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


def test_audits_find_no_error(loaded):
    target = loaded.target(max_batch_size=4, max_context_len=64, topk=2)
    report = gk.audit_target(target, batch_sizes=[4], device="cuda")
    assert [finding.text for finding in report.findings if finding.severity == "error"] == []
