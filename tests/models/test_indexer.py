"""Indexers of models of transformers, which select the keys that a row attends to."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("graphkit.models")

import graphkit as gk
from graphkit import models
from graphkit.audit.kit.attention_cases import BatchInputs
from graphkit.errors import AttentionError, ConfigError
from graphkit.models import pools, running
from graphkit.models.prepare import PooledIndexer
from mtp_folders import save_with_mtp
from small_models import DELTA, WINDOW, small_model

PROMPT = [(7 * n) % 101 + 3 for n in range(40)]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def shared():
    """A model whose second layer attends to the keys that the first one selects."""
    return models.load(small_model("glm_moe_dsa"), device="cpu")


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


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_selection_may_differ_by_rounding(kind):
    """Scores of keys that are nearly equal in bfloat16 select other keys in batches of other sizes.

    Issue 57: models with indexers were refused in bfloat16.
    """
    models.load(small_model(kind), device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_selection_is_refused(monkeypatch, dtype):
    select = PooledIndexer.__call__

    def earliest(*args, **kwargs):
        positions = select(*args, **kwargs).positions
        number = positions.shape[1] - 1 - torch.arange(positions.shape[1])
        return running.SelectedKeys(torch.where(positions >= 0, number, -1))

    monkeypatch.setattr(PooledIndexer, "__call__", earliest)
    with pytest.raises(ConfigError, match="other logits through graphkit"):
        models.load(small_model("deepseek_v32"), device="cpu", dtype=dtype)


def test_each_row_attends_to_as_many_keys_as_the_model_selects(shared, monkeypatch):
    seen = []
    attend = pools.LayerGroupAttention.attend

    def noting(self, layer, call, *others):
        seen.append((call.selected.positions >= 0).sum(1).tolist())
        return attend(self, layer, call, *others)

    monkeypatch.setattr(pools.LayerGroupAttention, "attend", noting)
    with shared.engine(algorithm="NONE", max_batch_size=1, max_context_len=64) as engine:
        engine.generate([PROMPT[:12]], gk.SamplingParams(max_new_tokens=2))
    assert seen[:3] == [[min(row + 1, WINDOW) for row in range(12)]] * 3
    assert seen[3:6] == [[WINDOW]] * 3


@pytest.mark.slow
def test_prompts_in_chunks_give_the_text_of_transformers(shared):
    prompts = [PROMPT, PROMPT[5:25], PROMPT[::-1]]
    with shared.engine(
        topk=2, max_batch_size=3, max_context_len=64, chunked_prefill_size=16, page_size=4
    ) as engine:
        requests = engine.generate(prompts, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [each.output_ids for each in requests] == [expected(shared, each) for each in prompts]


@pytest.mark.slow
def test_a_draft_model_may_have_an_indexer():
    loaded = models.load(small_model("llama"), draft=small_model("axk2"), device="cpu")
    with loaded.engine(num_steps=3, max_batch_size=1, max_context_len=64) as engine:
        (request,) = engine.generate([PROMPT], gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert request.output_ids == expected(loaded, PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "topk"), [(1, 1), (1, 2), (2, 1)], ids=["one", "tree", "chain"])
def test_mtp_layers_may_have_indexers(tmp_path, count, topk):
    save_with_mtp(small_model("glm_moe_dsa"), tmp_path, 2, count=count)
    loaded = models.load(tmp_path, draft="mtp", device="cpu")
    layers = [len(layer.layout.indexers) for layer in loaded.draft.module.chain]
    assert layers == [1] * count
    with loaded.engine(
        num_steps=2, topk=topk, max_batch_size=2, max_context_len=64, batch_sizes=[2],
        generation="v3",
    ) as engine:  # fmt: skip
        engine.capture()
        prompts = [PROMPT, PROMPT[::-1]]
        requests = engine.generate(prompts, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
        assert all(not runner.stats.fallbacks for runner in engine.runners)
    assert [each.output_ids for each in requests] == [expected(loaded, each) for each in prompts]


def test_an_mtp_layer_with_an_indexer_computes_what_its_decoder_computes(tmp_path):
    save_with_mtp(small_model("deepseek_v32"), tmp_path, 1, count=2)
    loaded = models.load(tmp_path, draft="mtp", device="cpu", check=False)
    head, rows = loaded.draft.module, 2 * WINDOW
    table = gk.ReqToTokenPool(1, rows, "cpu")
    table.req_to_token[1] = torch.arange(rows) + 1
    attention = pools.LayerGroupAttention(
        table, head.layout.attention, 1, torch.float32, head.layout.indexers
    )
    one = torch.ones(1, dtype=torch.int64)
    batch = BatchInputs(one, one.int() * rows, one.int() * rows, 1, rows, rows, None)
    ids, hidden = torch.randint(128, (rows,)), torch.randn(rows, 64)
    inputs = SimpleNamespace(
        attention=attention.metadata(gk.ForwardMode.DRAFT_EXTEND_V2, batch), input_ids=ids,
        out_cache_loc=torch.arange(rows) + 1, positions=torch.arange(rows), hidden_states=hidden,
    )  # fmt: skip
    decoder = deepcopy(loaded.original.model)
    decoder.config.num_hidden_layers = 1
    decoder.layers = decoder.layers[1:]
    for number, layer in enumerate(head.chain):
        decoder.layers[0].load_state_dict(layer.block.state_dict())
        decoder.norm.load_state_dict(layer.norm.state_dict())
        embedded = decoder.embed_tokens(ids)
        merged = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1))
        expected = decoder(
            inputs_embeds=merged[None], position_ids=inputs.positions[None], use_cache=False
        )
        output = head.layer_forward(number, attention)(inputs)
        torch.testing.assert_close(output.hidden_states, expected.last_hidden_state[0])
    buffers = attention.kv_pool.tensors().items()
    assert [bool(keys.any()) for name, keys in buffers if "index_k" in name] == [True, True]


def test_the_model_itself_runs_inside_a_forward_alone():
    loaded = models.load(small_model("axk2"), device="cpu", check=False)
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
        models.load(small_model(kind, **changes), device="cpu")
    assert "\n" not in str(caught.value)
