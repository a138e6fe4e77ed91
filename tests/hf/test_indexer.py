"""Indexers of models of transformers, which select the keys that a row attends to."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("graphkit.hf")

import graphkit as gk
from graphkit import hf
from graphkit.errors import AttentionError, ConfigError
from small_models import DELTA, WINDOW, small_model

PROMPT = [(7 * n) % 101 + 3 for n in range(40)]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def shared():
    """A model whose second layer attends to the keys that the first one selects."""
    return hf.load(small_model("glm_moe_dsa"), device="cpu")


def expected(model, prompt):
    ids = model.original.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        do_sample=False,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


def test_index_keys_are_learnt_from_a_forward(shared):
    names = [f"model.layers.{layer}.self_attn.indexer" for layer in (0, 2)]
    assert [layer.name for layer in shared.layout.indexers] == names
    assert {(layer.size, layer.dtype) for layer in shared.layout.indexers} == {(16, torch.float32)}
    assert [layer.name for layer in shared.layout.attention] == [
        f"model.layers.{layer}.self_attn" for layer in range(3)
    ]


def test_each_row_attends_to_as_many_keys_as_the_model_selects(shared, monkeypatch):
    seen = []
    attend = hf.pools.LayerGroupAttention.attend

    def noting(self, layer, call, *others):
        seen.append((call.selected.positions >= 0).sum(1).tolist())
        return attend(self, layer, call, *others)

    monkeypatch.setattr(hf.pools.LayerGroupAttention, "attend", noting)
    with shared.engine(algorithm="NONE", max_batch_size=1, max_context_len=64) as engine:
        engine.generate([PROMPT[:12]], gk.SamplingParams(max_new_tokens=2))
    assert seen[:3] == [[min(row + 1, WINDOW) for row in range(12)]] * 3
    assert seen[3:6] == [[WINDOW]] * 3


@pytest.mark.slow
def test_prompts_in_chunks_give_the_text_of_transformers(shared):
    prompts = [PROMPT, PROMPT[5:25], PROMPT[::-1]]
    with shared.engine(
        topk=2, max_batch_size=3, max_context_len=64, chunked_prefill_size=16
    ) as engine:
        requests = engine.generate(prompts, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [each.output_ids for each in requests] == [expected(shared, each) for each in prompts]


@pytest.mark.slow
def test_a_draft_model_may_have_an_indexer():
    loaded = hf.load(small_model("llama"), draft=small_model("axk2"), device="cpu")
    with loaded.engine(num_steps=3, max_batch_size=1, max_context_len=64) as engine:
        (request,) = engine.generate([PROMPT], gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert request.output_ids == expected(loaded, PROMPT)


def test_the_model_itself_runs_inside_a_forward_alone():
    loaded = hf.load(small_model("axk2"), device="cpu", check=False)
    with pytest.raises(AttentionError, match="call the forward of its target, not the model"):
        loaded.model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    assert loaded.original(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "minimax_m3_vl_text",
            {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2},
            "passes block_indices to its attention",
        ),
        (
            "qwen4_exp_text",
            DELTA | {
                "layer_types": ["linear_attention", "indexed_attention"], "hc_lowrank": 8,
                "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                "indexer_budget": 8, "indexer_compress_ratio": 2,
            },
            "does not return the positions of the keys",
        ),
    ],
)  # fmt: skip
def test_other_ways_to_select_keys_are_refused(kind, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        hf.load(small_model(kind, **changes), device="cpu")
    assert "\n" not in str(caught.value)
