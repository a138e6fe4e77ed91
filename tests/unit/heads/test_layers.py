"""Layers of heads are those of transformers, and run fused as they run plain."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from training.folders import config_entries

from causal_attention import causal_attend, run_head
from graphkit.errors import ConfigError
from graphkit.models.fusion.norms import DeferredProduct
from graphkit.models.heads.config import layer_config
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
KINDS = {
    "llama": (hf.LlamaConfig, {"rms_norm_eps": 1e-3}),
    "llama-wide-heads": (hf.LlamaConfig, {"head_dim": 24}),
    "llama-llama3": (hf.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-bias": (hf.LlamaConfig, {"attention_bias": True}),
    "mistral": (hf.MistralConfig, {"head_dim": 24}),
    "mistral-window": (hf.MistralConfig, {"sliding_window": 9}),
    "qwen2": (hf.Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 32}),
    "qwen3-bias": (hf.Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}
HEADS = {
    "eagle": (EagleHead, {}),
    "eagle3": (Eagle3Head, {"aux_layers": (0, 1, 2)}),
    "eagle3-normed": (Eagle3Head, {"aux_layers": (0, 1, 2), "norm_before_residual": True}),
    "dflash": (DFlashHead, {"target_layer_ids": (0,), "block_size": 4, "mask_token_id": 5}),
}


def make(kind, name, target):
    """Return a random head."""
    create, options = KINDS[kind]
    head_class, settings = HEADS[name]
    head = head_class(create(**SIZES, **options), target, **settings)
    for number, (parameter, weight) in enumerate(head.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        weight.data.normal_(1.0 if "norm" in parameter else 0.0, 0.15, generator=generator)
    return head.eval().requires_grad_(False)


def results(head):
    """Return what a head computes for 40 rows of one request, and the windows of its attention."""
    generator = torch.Generator().manual_seed(1)
    ids, windows = torch.randint(96, (40,), generator=generator), []
    wide = 64 * (3 if isinstance(head, Eagle3Head) else 1)
    features = torch.randn(40, wide, generator=generator)
    rows = (ids,) if isinstance(head, DFlashHead) else (ids, features)
    causal = causal_attend(1, 40)

    def attend(layer, query, key, value):
        windows.append(layer)
        return causal(layer, query, key, value)

    hidden = run_head(head, *rows, torch.arange(40), attend)
    context = ()
    if isinstance(head, DFlashHead):
        context = head.context_heads(head.encoder(features), torch.arange(40))
    return hidden, head.logits(hidden), context


def is_deferred(head, weight):
    """Return whether the norm behind a product adds it to the residual stream."""
    layer = head.get_submodule(weight.rpartition(".")[0])
    return isinstance(vars(layer).get("forward"), DeferredProduct)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_prepared_head_computes_what_it_computed(kind, name, target):
    head = make(kind, name, target)
    expected, names = results(head), dict(head.state_dict())
    layout = head.prepare()
    torch.testing.assert_close(results(head), expected, rtol=1e-4, atol=1e-4)
    assert head.prepare() is layout
    assert {key: value.shape for key, value in head.state_dict().items()} == {
        key: value.shape for key, value in names.items()
    }
    (attention,) = layout.attention
    replaced = layout.replaced[attention.name]
    assert replaced == "graphkit::store_rotated_heads before attention"
    assert "one product of" in layout.replaced[f"{attention.name}.q_proj"]
    layer = attention.name.removesuffix("self_attn")
    assert layout.replaced[f"{layer}mlp"] == "graphkit::silu_and_mul within a product"
    assert layout.replaced[f"{layer}post_attention_layernorm"] == "graphkit::rms_norm"
    weights = [name for name in names if name.endswith(".weight")]
    deferred = [name for name in weights if is_deferred(head, name)]
    last = [f"{layer}mlp.down_proj.weight"] * (name != "eagle")  # EAGLE has no norm behind it
    assert deferred == [f"{attention.name}.o_proj.weight", *last]
    assert attention.window == {"mistral": 4096, "mistral-window": 9}.get(kind, 0)
    assert attention.heads == 2


def test_a_head_that_is_not_fused_keeps_its_modules(target):
    head = make("llama", "eagle3", target)
    assert not head.prepare(fuse=False).replaced


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_survives_the_round_trip(kind):
    create, options = KINDS[kind]
    config = layer_config(create(**SIZES, **options).to_dict())
    again = layer_config(config_entries(config))
    assert type(again) is create
    assert config_entries(again) == config_entries(config)


@pytest.mark.parametrize("kind", ["llama", "llama-llama3"])
def test_rotary_frequencies_survive_casts_and_moves(kind, target):
    head = make(kind, "eagle", target)
    before, address = head.rotary_emb.inv_freq.clone(), head.rotary_emb.inv_freq.data_ptr()
    head.to(torch.bfloat16).float().cpu()
    assert head.rotary_emb.inv_freq.data_ptr() == address
    assert torch.equal(head.rotary_emb.inv_freq, before)
    head.to("meta").to_empty(device="cpu")
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary_emb.inv_freq, before)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_parameters": LINEAR}, "rope_type"),
    ],
)
def test_a_config_built_by_hand_is_checked(change, field, target):
    config = hf.LlamaConfig(**SIZES | {"num_hidden_layers": 1} | change)
    with pytest.raises(ConfigError, match=field) as caught:
        EagleHead(config, target)
    assert caught.value.field == field


def test_a_head_has_layers_of_a_published_type(target):
    with pytest.raises(
        ConfigError, match=r"model_type 'gemma'.*llama or mistral or qwen2"
    ) as caught:
        EagleHead(hf.GemmaConfig(**SIZES), target)
    assert caught.value.field == "model_type"
    with pytest.raises(ConfigError, match="config must be a config of transformers"):
        EagleHead(None, target)
