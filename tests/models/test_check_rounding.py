"""The check at load allows what a model's own decoding rounds, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit import models
from graphkit.engine.kv import RecurrentStatePool
from graphkit.errors import ConfigError
from graphkit.models.load_check import check_loaded
from small_models import small_model

ROUNDING, ERROR = 3e-4, 0.1
"""Relative errors of a mixer: logits differ by 2,000 ulp of float32, or by more than rounding."""
ROUNDING_OF_ATTENTION = 2e-5
"""Relative error of attention: logits differ by more than 32 ulp, which are allowed without it."""


def inexact_in_chunks(kind, difference):
    """Return a prepared model whose own first layer computes several tokens inexactly."""
    loaded = models.load(small_model(kind), device="cpu", check=False)
    layers = loaded.layout.recurrent or loaded.layout.attention
    mixer = loaded.original.get_submodule(layers[0].name)
    forward = mixer.forward

    def inexact(hidden_states, **others):
        out = forward(hidden_states, **others)
        if hidden_states.shape[1] == 1:
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = first * (1 + difference)
        return (first, *rest) if isinstance(out, tuple) else first

    mixer.forward = inexact
    return loaded


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("qwen3_5_text", ROUNDING), ("qwen3_5_moe_text", ROUNDING), ("bamba", ROUNDING),
        ("llama", ROUNDING_OF_ATTENTION),
    ],
)  # fmt: skip
def test_the_rounding_of_the_models_own_decoding_is_allowed(kind, difference):
    check_loaded(inexact_in_chunks(kind, difference))


def test_a_difference_beyond_rounding_is_refused():
    with pytest.raises(ConfigError, match="computes other logits through graphkit"):
        check_loaded(inexact_in_chunks("qwen3_5_text", ERROR))


def test_a_model_that_does_not_decode_allows_nothing_more(monkeypatch):
    loaded = inexact_in_chunks("qwen3_5_text", ROUNDING)
    forward = type(loaded.original).forward

    def without_cache(self, *args, past_key_values=None, **others):
        assert past_key_values is None, "no cache"
        return forward(self, *args, **others)

    monkeypatch.setattr(type(loaded.original), "forward", without_cache)
    with pytest.raises(ConfigError, match="computes other logits through graphkit"):
        check_loaded(loaded)


@pytest.mark.parametrize("difference", [0.0, ROUNDING])
def test_a_state_that_is_committed_for_another_node_is_refused(difference, monkeypatch):
    loaded = inexact_in_chunks("qwen3_5_text", difference)
    commit = RecurrentStatePool.commit
    monkeypatch.setattr(
        RecurrentStatePool, "commit", lambda self, rows, nodes: commit(self, rows, nodes - 1)
    )
    with pytest.raises(ConfigError, match="the drafts of request 0"):
        check_loaded(loaded)


def test_a_model_that_rounds_much_is_loaded():
    model = small_model(
        "qwen3_5_text", vocab_size=131, hidden_size=48, intermediate_size=72,
        num_hidden_layers=4, layer_types=[*["linear_attention"] * 3, "full_attention"],
        num_attention_heads=6, num_key_value_heads=3,
        linear_num_value_heads=6, linear_key_head_dim=6, linear_value_head_dim=10,
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.15)
        elif "bias" in name:
            nn.init.normal_(weight, std=0.1)
        elif "norm" in name:
            weight.add_(torch.randn_like(weight) * 0.1)
    models.load(model, device="cpu")
