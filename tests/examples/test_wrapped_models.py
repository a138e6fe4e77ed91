"""Wrappers of transformers models that drop what their model needs are found or refused."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from graphkit import models
from graphkit.models.wrapper import compare_wrapper
from graphkit.testing import check_wrapper
from small_models import DIFFERENT_KINDS, small_config, small_model
from tools.examples.broken import dropped_positions

CHUNK = 16


def test_dropped_chunks_are_found_at_the_first_row_of_the_second_chunk(monkeypatch):
    """Llama 4 marks chunks in the mask alone, which the registry does not pass on."""
    monkeypatch.setattr(models.forward, "_chunk_size", lambda _: 0)
    model = small_model("llama4_text", attention_chunk_size=CHUNK)
    loaded = models.load(model, device="cpu", check=False)
    target = loaded.target(max_batch_size=4, max_context_len=64)
    found = compare_wrapper(target, target.model, device="cpu").difference
    assert found.position == CHUNK
    assert found.module == "model.layers.0.self_attn"
    assert f"attention_chunk_size of the model is {CHUNK}" in found.advice


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_a_right_wrapper_agrees_in_bfloat16(kind):
    loaded = models.load(small_model(kind).bfloat16(), device="cpu", check=False)
    target = loaded.target(max_batch_size=4, max_context_len=64)
    assert compare_wrapper(target, target.model, device="cpu").difference is None


@pytest.mark.parametrize(("kind", "module"), [("opt", "model.decoder"), ("gpt2", "transformer")])
def test_learnt_positions_that_are_not_passed_are_found(kind, module):
    config = small_config(kind)
    check_wrapper(models.load(small_model(kind), device="cpu", check=False).target(), device="cpu")
    target = dropped_positions.target(config=config)
    found = compare_wrapper(target, target.model, device="cpu").difference
    assert found.batch == "the drafts of request 0"
    assert found.module.startswith(module)
    assert found.source


@pytest.mark.slow
def test_a_capture_of_a_lossy_wrapper_fails(capsys):
    from graphkit.cli import main

    target = "tools.examples.broken.dropped_window:target"
    assert main(["capture", target, "--device", "cpu", "--batch-sizes", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "live batches replayed: each equals" in printed
    assert "The wrapper differs from its model: TARGET_VERIFY: row 8 of the prompt of" in printed
    assert "mistral/modeling_mistral.py:" in printed
