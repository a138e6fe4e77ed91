"""Models of transformers on CUDA: captured text, and audits in bfloat16."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit import models
from small_models import DIFFERENT_KINDS, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14


@pytest.fixture(scope="module", params=DIFFERENT_KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("kind", [*DIFFERENT_KINDS, "deepseek_v32"])
def test_captured_loops_give_the_text_of_transformers(kind):
    loaded = models.load(small_model(kind), device="cuda")
    expected = [
        loaded.original.generate(
            torch.tensor([prompt], device="cuda"), max_new_tokens=NEW_TOKENS, eos_token_id=None,
            pad_token_id=0, do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    for topk in (1, 2):
        with loaded.engine(
            topk=topk, max_batch_size=4, max_context_len=64, batch_sizes=[4], generation="v3"
        ) as engine:
            engine.capture()
            requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
            assert all(not runner.stats.fallbacks for runner in engine.runners)
        assert [request.output_ids for request in requests] == expected


def test_audits_of_a_sound_model_in_bfloat16_find_no_error(kind):
    loaded = models.load(small_model(kind), dtype=torch.bfloat16, device="cuda")
    report = gk.audit_target(loaded.target(max_batch_size=4), batch_sizes=[1, 2, 4], device="cuda")
    assert [finding.text for finding in report.findings if finding.severity == "error"] == []
