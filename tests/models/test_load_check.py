"""The check at load: windows that it reaches, rounding that it allows, and memory that it needs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from graphkit import models
from graphkit.engine import SamplingParams
from graphkit.engine.kv import RecurrentStatePool
from graphkit.errors import ConfigError
from graphkit.models.load_check import check_loaded
from graphkit.models.wrapper.model_logits import ModelLogits
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
    monkeypatch.setattr("graphkit.models.forward._chunk_size", lambda _: 0)
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


@pytest.mark.slow
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
def test_states_that_are_not_committed_are_refused(difference, monkeypatch):
    loaded = inexact_in_chunks("qwen3_5_text", difference)
    monkeypatch.setattr(RecurrentStatePool, "commit", lambda *_: None)
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


PEAK_OF_CHECKS = """
import gc, json, sys
from pathlib import Path
from graphkit import models
from graphkit.engine import SamplingParams
from graphkit.models.load_check import check_loaded
from small_models import small_model

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

def peak(vocab_size, window):
    loaded = models.load(
        small_model("gemma3_text", vocab_size=vocab_size, sliding_window=window,
                    max_position_embeddings=1024),
        device="cpu", check=False,
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    check_loaded(loaded)
    return resident("VmHWM") - before

peak(128, 8)  # imports what the check imports
print(json.dumps([peak(*map(int, each.split(","))) for each in sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_does_not_grow_with_rows_and_vocabulary():
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MALLOC_MMAP_THRESHOLD_": str(2**16),  # the C library returns freed tensors at once
    }
    sizes = ["128000,8", "128000,500"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_CHECKS, *sizes],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(peaks) < 40e6, peaks  # logits of 508 rows of 128,000 numbers have 260 MB


def most_logits(model):
    """Return the largest number of logits that the model and its wrapper compute at once."""
    loaded = models.load(model, device="cpu", check=False)
    found = []
    for each in (loaded.model, loaded.original):
        each.lm_head.register_forward_hook(lambda _, __, output: found.append(output.numel()))
    check_loaded(loaded)
    return max(found)


def test_few_logits_are_computed_at_once():
    sizes = {"max_position_embeddings": 256, "sliding_window": 100}
    for vocab_size in (20_000, 60_000):
        model = small_model("gemma3_text", vocab_size=vocab_size, **sizes)
        assert most_logits(model) <= 2**20


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), (8, 64)], ids=["eager", "captured"])
def test_prompts_compute_the_logits_of_their_last_tokens_alone(sizes):
    loaded = models.load(small_model("llama"), device="cpu")
    rows = []
    loaded.model.lm_head.register_forward_hook(lambda _, __, output: rows.append(output.shape[-2]))
    with loaded.engine(algorithm="NONE", max_context_len=64, prefill_sizes=sizes) as engine:
        engine.capture()
        captured = set(rows)
        rows.clear()
        engine.generate([[*range(5, 45)]], SamplingParams(max_new_tokens=1))
    assert captured.isdisjoint(range(9, 100))
    assert rows == ([] if sizes else [1])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "cohere", "granite", "opt", "mamba"])
def test_logits_of_some_rows_are_those_of_all(kind):
    """Gemma bounds its logits behind the head, Cohere and Granite scale them."""
    model = small_model(kind)
    ids = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(0))
    logits = ModelLogits(model, torch.device("cpu"), 128)
    run = logits.of(ids)
    expected = model(ids[None]).logits[0]
    for positions in ([3], range(20), [19, 0, 7]):
        assert torch.allclose(run.rows(positions), expected[list(positions)], atol=1e-5)
    assert "forward" not in vars(model.base_model)
