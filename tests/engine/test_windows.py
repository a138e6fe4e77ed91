"""Layers with a window whose KV is in a separate pool: text and refusals."""

from __future__ import annotations

import pytest
import torch

from engine_runs import outputs, refuses
from erring_oracle import ErringOracle
from graphkit.engine import SamplingParams, SpeculativeEngine
from graphkit.engine.kv import ReqToTokenPool, TokenToKVPool
from graphkit.engine.step import SpecStepRunner
from graphkit.errors import ConfigError
from window_models import (
    CONTEXT,
    REQUESTS,
    VOCAB,
    WindowModel,
    settings,
    window_attention,
    window_target,
)

PROMPTS = [[5, 9, 2, 33, 20, 11, 50, 8], [7], [1, 2, 3], [60, 1, 4, 4, 19, 21]]
NEW = 17


@pytest.fixture(scope="module")
def model(device):
    return WindowModel(device)


@pytest.fixture(scope="module")
def texts(model):
    return [[*prompt, *model.plain(prompt, NEW)] for prompt in PROMPTS]


def engine(model, texts, topk, generation, *, page_size=1, **pools):
    attention = window_attention(model.device, page_size=page_size, **pools)
    return SpeculativeEngine(
        window_target(model, attention),
        ErringOracle(texts, NEW, topk, VOCAB),
        **settings(topk, page_size),
        batch_sizes=[REQUESTS],
        device=model.device,
        generation=generation,
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_window_pool", [False, True], ids=["one pool", "two pools"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_text_is_that_of_plain_decoding(
    model, texts, topk, generation, page_size, has_window_pool
):
    with engine(
        model, texts, topk, generation, page_size=page_size, has_window_pool=has_window_pool
    ) as made:
        made.capture()
        requests = made.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        stats = made.stats
    assert outputs(requests) == [text[-NEW:] for text in texts]
    assert stats.fallbacks == {}
    assert 1.5 < stats.accept_length < 4, "some drafts are accepted and some rejected"


def test_without_moves_of_the_window_pool_the_text_differs(model, texts, monkeypatch):
    """The texts are sensitive to the moves: the test above cannot pass by accident."""
    made = engine(model, texts, 2, "v2")
    pool = made._spec_step.verifier.runner.attention.window_kv_pool
    move = TokenToKVPool.move_kv_cache
    monkeypatch.setattr(
        TokenToKVPool, "move_kv_cache", lambda each, *slots: each is pool or move(each, *slots)
    )
    with made:
        requests = made.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert outputs(requests) != [text[-NEW:] for text in texts]


def whole_step(model, texts, **pools):
    attention = window_attention(model.device, **pools)
    return SpecStepRunner(
        window_target(model, attention),
        ErringOracle(texts, NEW, 2, VOCAB),
        **settings(2),
        batch_sizes=[REQUESTS],
        device=model.device,
    )


def test_a_whole_step_moves_the_window_pool(model, texts):
    runner = whole_step(model, texts)
    context = runner.spec_step.context
    table = 1 + torch.arange(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT)
    context.req_to_token[1:] = table.int()
    with runner:
        runner.capture()
        for row in (1, 2):
            runner.admit(row, PROMPTS[row], max_new_tokens=NEW)
        found = {1: [], 2: []}
        for step in runner.launch([1, 2], max_steps=NEW):
            for each in step.requests:
                found[each.req_pool_index] += each.tokens
    assert found == {row: texts[row][1 - NEW :] for row in (1, 2)}


@pytest.mark.parametrize("make", [whole_step, lambda *args, **pools: engine(
    args[0], args[1], 2, None, **pools)], ids=["whole step", "engine"])  # fmt: skip
@pytest.mark.parametrize(
    ("pools", "field", "text"),
    [
        ({"window_slots": 8}, "window_kv_pool", "window_kv_pool has 8 slots in pages of 1, but a"),
        ({"window_page": 4}, "window_kv_pool", "192 slots in pages of 4, .* in pages of 1"),
        (
            {"table": "own"},
            "window_req_to_token_pool",
            "a separate table, which steps do not fill. Pass the backend's req_to_token_pool as",
        ),
    ],
)
def test_pools_that_steps_cannot_fill_are_refused(model, texts, make, pools, field, text):
    if pools.get("table"):
        pools = {"table": ReqToTokenPool(REQUESTS, CONTEXT, model.device)}
    with refuses(ConfigError, field, text):
        make(model, texts, **pools)
