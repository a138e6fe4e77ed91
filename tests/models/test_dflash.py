"""A DFLASH head drafts for any target of transformers, and changes nothing in its text."""

from __future__ import annotations

import pytest
import torch
from training.folders import save_draft_head
from transformers import Qwen3Config

import graphkit as gk
from draft_choices import force_variant
from graphkit import models
from graphkit.errors import CheckpointError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.load import head_sources
from small_models import small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14


def head_for(kind):
    """A random head of two layers that reads the first layer of a target."""
    other = models.load(small_model(kind), device="cpu", check=False)
    shared = head_sources(other.model, other.layout)
    config = Qwen3Config(
        vocab_size=shared.vocab_size, hidden_size=shared.hidden_size,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=64, )  # fmt: skip
    torch.manual_seed(1)
    head = DFlashHead(config, shared, target_layer_ids=(0,), block_size=6, mask_token_id=4)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return head


@pytest.fixture(scope="module", params=["gemma2", "qwen3_next"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    save_draft_head(head_for(request.param), folder)
    loaded = models.load(small_model(request.param), draft=folder, device="cpu")
    assert loaded.algorithm == "DFLASH"
    return loaded


def texts(loaded, sampling, **options):
    options.setdefault("num_steps", loaded.spec(options.get("algorithm")).num_steps)
    with loaded.engine(max_batch_size=4, max_context_len=64, batch_sizes=[4], **options) as engine:
        engine.capture()
        requests = engine.generate(PROMPTS, sampling)
        assert all(not runner.stats.fallbacks for runner in engine.runners)
        return [request.output_ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(loaded, temperature):
    sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=3)
    plain = texts(loaded, sampling, algorithm="NONE")
    assert texts(loaded, sampling, generation="v1") == plain
    assert texts(loaded, sampling, generation="v2", num_draft_tokens=6) == plain
    assert texts(loaded, sampling, generation="v3", page_size=4) == plain


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_blocks_of_which_steps_verify_a_part_change_no_text(loaded, generation):
    sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
    plain = texts(loaded, sampling, algorithm="NONE")
    options = {"max_batch_size": 4, "max_context_len": 64, "batch_sizes": [4]}
    with loaded.engine(generation=generation, steps_per_launch=1, **options) as engine:
        assert engine.spec.num_steps == (0, 3)
        engine.capture()
        requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
        turn = 0
        while engine.has_work:
            force_variant(engine, (1, 2, 3, 0)[turn % 4])
            engine.step()
            turn += 1
        assert {0, 3} < set(engine.stats.drafted_lengths), "rows were divided"
        assert [request.output_ids for request in requests] == plain


@pytest.mark.slow
def test_the_whole_step_is_captured_and_audits_clean(loaded):
    target = loaded.target(max_batch_size=4, max_context_len=64)
    assert target.modes[-1] is gk.ForwardMode.STEP
    report = gk.audit_target(target, only=["loop"], batch_sizes=[4])
    assert report.findings == ()


def test_a_head_for_another_target_is_refused(tmp_path):
    save_draft_head(head_for("gemma2"), tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size"):
        models.load(small_model("gemma2", hidden_size=128), draft=tmp_path, device="cpu")
