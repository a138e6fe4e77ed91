"""Texts and log-probabilities of every drafter are those of decoding alone, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine_runs import finish
from exact_sums import exact_sums
from graphkit import models
from graphkit.engine import SamplingParams
from graphkit.models.heads.draft_model import StandaloneDraft
from small_models import small_model
from small_targets import drafted_llama, mtp_chain, with_draft

pytestmark = pytest.mark.slow

PROMPTS = [[5], [*range(40, 51)], [7, 7], [0] * 23, [230, 4], [*range(90, 127)]]
PARAMS = [
    SamplingParams(max_new_tokens=18, logprobs=True, **setting)
    for setting in (
        {"temperature": 0.8, "seed": 7},
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 1.2, "top_p": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 12, "min_p": 0.05, "seed": 2},
        {"frequency_penalty": 0.5},
    )
]
SETTINGS = [
    {"generation": "v1", "num_steps": 3},
    {"generation": "v2", "num_steps": 2, "topk": 2, "num_draft_tokens": 6},
    {"generation": "v3", "num_steps": 3, "kv_slots": 110, "steps_per_launch": 2},
    {"generation": "v3", "num_steps": 3, "topk": 2, "num_draft_tokens": 7, "page_size": 4},
    {"generation": "v2", "num_steps": (1, 3), "chunked_prefill_size": 64},
]
KINDS = ["NGRAM", "EAGLE", "EAGLE3", "DFLASH", "MTP", "STANDALONE"]


@pytest.fixture(autouse=True)
def equal_rows():
    """Let the functions of a CPU give equal bits for equal rows."""
    with exact_sums():
        yield


def model(kind, dtype):
    """Return a Llama whose drafts are sometimes right."""
    if kind in ("NGRAM", "NONE"):
        return drafted_llama(None, dtype=dtype)
    if kind == "MTP":
        plain = drafted_llama(None, dtype=dtype)
        return with_draft(plain, mtp_chain(plain))
    if kind == "STANDALONE":
        small = drafted_llama(None, dtype=dtype, layers=1)
        draft = StandaloneDraft(small.model, small.layout)
        return with_draft(drafted_llama(None, dtype=dtype), draft)
    block = {"target_layer_ids": (0,), "block_size": 4, "mask_token_id": 255}
    return drafted_llama(kind, dtype=dtype, **block if kind == "DFLASH" else {})


def served(engine, pairs):
    """Return text and log-probabilities of requests, of which one joins per step."""
    with engine:
        requests = []
        for prompt, params in pairs:
            requests.append(engine.submit(prompt, params))
            engine.step()
        finish(engine)
        return [(request.output_ids, request.logprobs) for request in requests]


@cache
def alone(dtype):
    """Return the texts of engines of one request without drafts, each prompt in one chunk."""
    plain, runs = model("NONE", dtype), []
    for pair in zip(PROMPTS, PARAMS, strict=True):
        engine = plain.engine(algorithm="NONE", max_batch_size=1, generation="v1")
        runs += served(engine, [pair])
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter(kind, settings, dtype):
    if kind == "DFLASH":  # drafts a block
        shape = ("num_steps", "topk", "num_draft_tokens")
        settings = {name: value for name, value in settings.items() if name not in shape}
        settings["num_steps"] = (1, 3) if settings["generation"] == "v2" else 3
    engine = model(kind, dtype).engine(
        max_batch_size=4, max_context_len=128, **{"chunked_prefill_size": 5} | settings
    )
    engine.capture()
    assert served(engine, zip(PROMPTS, PARAMS, strict=True)) == alone(dtype)
    if "kv_slots" in settings and kind != "STANDALONE":  # which reserves more at once
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "granitemoehybrid", "mamba", "lfm2"])
def test_recurrent_layers(kind):
    """Bits of a prompt do not depend on the drafts of later steps; those of its chunks may."""
    hybrid = models.load(small_model(kind), device="cpu", dtype=torch.bfloat16, check=False)
    pairs = list(
        zip([[token % 128 for token in prompt] for prompt in PROMPTS], PARAMS, strict=True)
    )
    shape = {"max_context_len": 128, "chunked_prefill_size": 512}
    texts = []
    for pair in pairs:
        texts += served(hybrid.engine(algorithm="NONE", max_batch_size=1, **shape), [pair])
    for settings in (
        {"num_steps": 3, "generation": "v1", "kv_slots": 110},
        {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "generation": "v2"},
        {"num_steps": (0, 2), "generation": "v3"},
    ):
        engine = hybrid.engine(algorithm="NGRAM", max_batch_size=4, **shape, **settings)
        engine.capture()
        assert served(engine, pairs) == texts, settings
