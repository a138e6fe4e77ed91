"""The decoder layer of heads computes what transformers' layer of its type does."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from causal_attention import causal_attend
from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.layers import AttendProjected, DecoderLayer
from graphkit.models.heads.rope import RotaryEmbedding

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
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


def both(kind):
    """Return the configuration of a head, and transformers' model without its head."""
    create, options = KINDS[kind]
    config = create(**SIZES, **options)
    model = hf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).get_decoder()
    for number, (name, weight) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        weight.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return LayerConfig.from_dict(config.to_dict()), model


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_that_of_transformers(kind):
    config, model = both(kind)
    layer, rotary = DecoderLayer(config, 0).requires_grad_(False), RotaryEmbedding(config)
    layer.load_state_dict(model.layers[0].state_dict())
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    attend = causal_attend(1, 40, config.sliding_window)
    fed, hidden = layer(layer.input_layernorm(rows), rows, rotary(torch.arange(40)), attend)
    model.norm = torch.nn.Identity()
    expected = model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(fed + hidden, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_survives_the_round_trip(kind):
    config, _ = both(kind)
    assert LayerConfig.from_dict(config.to_dict()) == config


def test_rotary_frequencies_survive_casts_and_moves():
    rope = RotaryEmbedding(both("llama-llama3")[0])
    before, address = rope.inv_freq.clone(), rope.inv_freq.data_ptr()
    rope.to(torch.bfloat16).float().cpu()
    assert rope.inv_freq.data_ptr() == address
    assert torch.equal(rope.inv_freq, before)
    rope.to("meta").to_empty(device="cpu")
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, before)


def test_what_attends_may_rotate_the_heads():
    class Rotating:
        """Rotates heads for an ``attend`` that does not."""

        def __init__(self, attend):
            self.attend, self.layers = attend, []

        def __call__(self, layer, query, key, value):
            raise AssertionError("called with rotated heads")

        def projected(self, layer, heads):
            self.layers.append(layer)
            return self.attend(layer, *heads.rotated())

    config, model = both("qwen3")
    layer, rotary = DecoderLayer(config, 1).requires_grad_(False), RotaryEmbedding(config)
    layer.load_state_dict(model.layers[0].state_dict())
    rows, attend = torch.randn(6, 64), causal_attend(2, 3)
    rotating, rotation = Rotating(attend), rotary(torch.arange(6))
    assert isinstance(rotating, AttendProjected)
    assert not isinstance(attend, AttendProjected)
    for got, expected in zip(
        layer(rows, rows, rotation, rotating), layer(rows, rows, rotation, attend), strict=True
    ):
        assert torch.equal(got, expected)
    assert rotating.layers == [1]
