"""Latent attention of models of transformers: what is kept of a token, and when."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("graphkit.models")

import graphkit as gk
from graphkit import models
from graphkit.models import pools
from small_models import small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], list(range(30, 42))]
NEW_TOKENS = 8


def rows_of(target):
    """Shape and dtype of a slot of each buffer."""
    pool = target.attention[gk.ForwardMode.TARGET_VERIFY].kv_pool
    return {(tuple(rows.shape[1:]), rows.dtype) for rows in pool.tensors().values()}


def texts(engine):
    with engine:
        requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=NEW_TOKENS))
    return [request.output_ids for request in requests]


def test_latents_are_kept_instead_of_keys_and_values():
    loaded = models.load(small_model("deepseek_v3"), device="cpu")
    (latent,) = {
        (layer.latent.rank, layer.latent.rotated_size) for layer in loaded.layout.attention
    }
    assert latent == (32, 8)
    assert rows_of(loaded.target()) == {((1, 40), torch.float32)}


ROTATIONS = {
    "deepseek_v2": (True, False), "deepseek_v3": (True, True), "minicpm3": (False, False),
    "kimi_linear": None, "glm4_moe_lite": (True, True), "youtu": (True, True),
}  # fmt: skip
"""Whether neighbours are a pair, and whether pairs are split; ``None`` without a rotation."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_attention_over_latents_is_replaced(kind, dtype):
    loaded = models.load(small_model(kind), device="cpu", dtype=dtype)
    names = [layer.name for layer in loaded.layout.attention if layer.latent is not None]
    assert names
    for name in names:
        assert loaded.layout.replaced[name] == "graphkit::store_latent_heads before attention"
        attention = loaded.model.get_submodule(name).forward
        rotation = attention.interleaved, attention.splits
        assert rotation == (ROTATIONS[kind] or rotation)
        assert attention.buffer.any() == (ROTATIONS[kind] is not None)


def test_the_norm_of_latents_is_not_that_of_queries():
    """Also where both have as many elements, and equal weights when the model is loaded."""
    loaded = models.load(small_model("deepseek_v3"), device="cpu")
    for layer in loaded.layout.attention:
        module = loaded.model.get_submodule(layer.name)
        assert module.q_a_layernorm.weight.equal(module.kv_a_layernorm.weight)
        assert module.forward.norm.weight is module.kv_a_layernorm.weight


def test_queries_of_latents_have_one_product_and_one_kernel_more():
    """Not a split, a rotation of each part, and a row of keys and values that nothing reads."""
    loaded = models.load(small_model("deepseek_v3"), device="cpu")
    with loaded.target(max_batch_size=2).runner(
        gk.ForwardMode.TARGET_VERIFY, device="cpu", batch_sizes=[2]
    ) as runner:
        runner.capture()
        (graph,) = runner.graphs.values()
        names = [str(op.op) for op in graph.ops]
    layers = len(loaded.layout.attention)
    assert names.count("graphkit.store_latent_heads.default") == layers
    assert names.count("graphkit.multiply_heads.default") == 2 * layers
    assert not {"aten.cat.default", "aten.new_empty.default"} & {*names}


def test_one_row_of_a_layer_is_expanded(monkeypatch):
    """Of a module that is not replaced."""
    loaded = models.load(small_model("deepseek_v3"), device="cpu", fuse=False)
    calls = []
    attend = pools.LayerGroupAttention.attend

    def noting(self, layer, call, *others):
        calls.append((call.query.shape[2], call.key.shape[2], call.latents.latents.shape[2]))
        return attend(self, layer, call, *others)

    monkeypatch.setattr(pools.LayerGroupAttention, "attend", noting)
    texts(loaded.engine(algorithm="NONE", max_batch_size=2, max_context_len=32))
    assert calls[0] == (21, 1, 21)
    assert all(expanded == 1 for _, expanded, _ in calls)


def test_keys_and_values_in_eight_bits_are_expanded():
    loaded = models.load(small_model("deepseek_v3"), device="cpu", check=False)
    sizes = {"max_batch_size": 2, "max_context_len": 32}
    target = loaded.target(kv_dtype=torch.float8_e4m3fn, **sizes)
    assert rows_of(target) == {((4, 24), torch.uint8)}
    latents = {"NONE": [], "NGRAM": []}
    for algorithm in latents:
        options = sizes | {"algorithm": algorithm, "kv_dtype": torch.float8_e4m3fn}
        latents[algorithm] = texts(loaded.engine(**options))
    assert latents["NONE"] == latents["NGRAM"]


def test_expanded_rows_attend_as_latents_do(monkeypatch):
    loaded = models.load(small_model("deepseek_v3"), device="cpu")
    sizes = {"max_batch_size": 2, "max_context_len": 32}
    expected = texts(loaded.engine(**sizes))
    monkeypatch.setattr(pools.MLATokenToKVPool, "dtypes", ())
    assert rows_of(loaded.target()) == {((4, 24), torch.float32)}
    assert texts(loaded.engine(page_size=4, **sizes)) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "quantize"),
    [("deepseek_v3", {}, "fp8"), ("deepseek_v3", {"kv_lora_rank": 520}, None), ("llama", {}, None)],
    ids=["quantised projection", "large latents", "no latents"],
)
def test_other_layers_keep_keys_and_values(kind, changes, quantize):
    loaded = models.load(small_model(kind, **changes), device="cpu", quantize=quantize)
    assert [layer.latent for layer in loaded.layout.attention] == [None, None]
