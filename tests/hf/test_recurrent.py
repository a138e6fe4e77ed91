"""Prompts through recurrent layers: one call of a mixer per chunk, and the text of transformers."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit import hf
from graphkit.hf.recurrent import PooledMixer
from small_models import small_model

WIDTH = 4


def mixers(loaded):
    forwards = (vars(module).get("forward") for module in loaded.model.modules())
    return [forward for forward in forwards if isinstance(forward, PooledMixer)]


def generate(loaded, prompt, new_tokens=8, **options):
    with loaded.engine(
        num_draft_tokens=WIDTH, max_batch_size=2, max_context_len=128, generation="v1", **options
    ) as engine:
        (request,) = engine.generate([prompt], gk.SamplingParams(max_new_tokens=new_tokens))
    return request.output_ids


def prompt_of(length):
    return torch.randint(
        3, 128, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def prefill_calls(loaded, length, monkeypatch, **options):
    """Return the calls of the first mixer until the first token."""
    mixer, calls = mixers(loaded)[0], []
    forward = mixer._forward

    def counted(rows, **others):
        calls.append(rows.shape[1])
        return forward(rows, **others)

    with monkeypatch.context() as patch:
        patch.setattr(mixer, "_forward", counted)
        generate(loaded, prompt_of(length), new_tokens=1, **options)
    return calls


@pytest.fixture(scope="module")
def qwen3_next():
    return hf.load(small_model("qwen3_next"), device="cpu")


def test_calls_do_not_grow_with_the_prompt(qwen3_next, monkeypatch):
    short, long = (prefill_calls(qwen3_next, length, monkeypatch) for length in (40, 112))
    assert short[:1] == [40 - WIDTH]
    assert long[:1] == [112 - WIDTH]
    assert len(short) == len(long) == 1 + WIDTH


def test_each_chunk_is_one_call_and_the_last_nodes(qwen3_next, monkeypatch):
    calls = prefill_calls(qwen3_next, 96, monkeypatch, chunked_prefill_size=48)
    assert calls == [48 - WIDTH, *[1] * WIDTH] * 2


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "granitemoehybrid", "mamba"])
def test_a_prompt_of_several_chunks_gives_the_text_of_transformers(kind):
    loaded = hf.load(small_model(kind), device="cpu")
    prompt = prompt_of(90)
    ids = loaded.original.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(loaded, prompt, chunked_prefill_size=32) == ids[0, 90:].tolist()


def test_a_mixer_that_forgets_the_states_of_a_chunk_runs_node_by_node(monkeypatch):
    loaded = hf.load(small_model("mamba"), device="cpu")  # its scan begins with zeros
    assert [mixer._takes_chunks for mixer in mixers(loaded)] == [False, False]
    assert set(prefill_calls(loaded, 40, monkeypatch)) == {1}


def test_each_mixer_is_compared_once(qwen3_next):
    assert [mixer._takes_chunks for mixer in mixers(qwen3_next)] == [True]
