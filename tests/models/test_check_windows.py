"""The check at load reaches windows and chunks of up to 1,024 tokens, and names larger ones."""

from __future__ import annotations

import logging

import pytest

from graphkit import models
from graphkit.errors import ConfigError
from graphkit.testing import check_wrapper
from small_models import small_model

POSITIONS = 8192
NODES, BEYOND = 4, 8


def with_chunks(size):
    return small_model(
        "llama4_text", attention_chunk_size=size, max_position_embeddings=POSITIONS,
        layer_types=["chunked_attention"] * 2, no_rope_layers=[1, 1],
    )  # fmt: skip


def with_window(size, **changes):
    changes = {"max_position_embeddings": POSITIONS} | changes
    return small_model("mistral", sliding_window=size, **changes)


def messages(caplog):
    return [
        each.getMessage() for each in caplog.records if each.name == "graphkit.models.load_check"
    ]


@pytest.mark.parametrize("size", [40, 300])
def test_dropped_chunks_are_found_at_load(size, monkeypatch, caplog):
    monkeypatch.setattr("graphkit.models.attention._chunk_size", lambda _: 0)
    caplog.set_level(logging.INFO, "graphkit")
    with pytest.raises(ConfigError, match=f"position {size} of request 0"):
        models.load(with_chunks(size), device="cpu")
    assert messages(caplog) == []


@pytest.mark.slow
def test_the_largest_window_that_is_reached_has_1024_tokens(caplog):
    with caplog.at_level(logging.INFO, "graphkit"):
        loaded = models.load(with_window(1024), device="cpu")
    assert messages(caplog) == []
    target = loaded.target(max_batch_size=2, max_context_len=1024 + BEYOND + NODES)
    record = check_wrapper(target, device="cpu")
    assert (record.prompt_length, record.not_reached) == (1024 + BEYOND, ())


def test_a_larger_window_is_named(caplog):
    with caplog.at_level(logging.INFO, "graphkit"):
        models.load(with_window(4096), device="cpu")
    (text,) = messages(caplog)
    assert text == (
        "the check of MistralForCausalLM at load does not test sliding_window 4096: its prompts "
        "have at most 64 tokens. To test it, call graphkit.testing.check_wrapper("
        f"model.target(max_context_len={4096 + BEYOND + NODES}))."
    )


def test_the_check_that_the_message_names_reaches_the_window(monkeypatch):
    monkeypatch.setattr("graphkit.models.load_check._LARGEST_WINDOW", 100)
    loaded = models.load(with_window(130), device="cpu")
    context = 130 + BEYOND + NODES
    assert check_wrapper(loaded.target(max_context_len=context), device="cpu").not_reached == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 512},  # the positions end before
        {"layer_types": ["full_attention"] * 2},  # no layer has the window
    ],
)
def test_a_window_without_effect_is_not_named(changes, caplog):
    kind = "mistral" if "max_position_embeddings" in changes else "qwen3"
    settings = {"max_position_embeddings": POSITIONS} | changes
    with caplog.at_level(logging.INFO, "graphkit"):
        models.load(small_model(kind, sliding_window=4096, **settings), device="cpu")
    assert messages(caplog) == []


def test_a_window_that_is_too_large_does_not_lengthen_the_prompts():
    loaded = models.load(with_window(4096), device="cpu", check=False)
    record = check_wrapper(loaded.target(max_context_len=256), device="cpu")
    assert (record.prompt_length, record.not_reached) == (64, ("sliding_window 4096",))
