"""The model: flat tokens, attention by the caller, no host synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphkit.errors import InputError
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.layers import causal_attend, initialise
from graphkit.models.sharded import LlamaModel, full_logits, load_checkpoint, save_checkpoint

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    qk_norm=True,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LlamaModel(CONFIG)
    initialise(model, CONFIG.num_hidden_layers)
    return model.requires_grad_(False)


class Cache:
    """An ``attend`` for one request that keeps keys and values between calls."""

    def __init__(self):
        self.kept = {}
        self.layers = []

    def __call__(self, layer, query, key, value):
        self.layers.append(layer)
        old = self.kept.get(layer, (key[:0], value[:0]))
        keys, values = self.kept[layer] = (torch.cat((old[0], key)), torch.cat((old[1], value)))
        past, new = len(old[0]), len(key)
        mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
        out = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, keys, values)), mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def test_token_by_token_equals_whole_sequences(model, ids):
    expected_BLV = full_logits(model, ids)
    for ids_L, expected_LV in zip(ids, expected_BLV, strict=True):
        cache = Cache()
        for begin, end in ((0, 5), (5, 6), (6, 9), (9, 48)):
            hidden = model(ids_L[begin:end], torch.arange(begin, end), cache)
            torch.testing.assert_close(model.logits(hidden), expected_LV[begin:end])


def test_attend_gets_every_layer_once_in_order_with_flat_heads(model):
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, query.shape, key.shape, value.shape))
        return query

    hidden = model(torch.arange(5), torch.arange(5), attend)
    assert hidden.shape == (5, 64)
    assert seen == [(layer, (5, 4, 8), (5, 2, 8), (5, 2, 8)) for layer in range(3)]


def test_causal_attend_keeps_requests_and_the_future_apart(model, ids):
    before = full_logits(model, ids)
    changed = ids.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 96
    after = full_logits(model, changed)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[0, :20], before[0, :20])
    assert not torch.equal(after[0, 20], before[0, 20])


def test_embeddings_replace_ids(model):
    ids, positions, attend = torch.arange(6), torch.arange(6), causal_attend(2, 3)
    expected = model(ids, positions, attend)
    embeds = model.model.embed_tokens(ids)
    assert torch.equal(model(None, positions, attend, input_embeds=embeds), expected)
    assert torch.equal(model(ids + 1, positions, attend, input_embeds=embeds), expected)
    with pytest.raises(InputError, match="neither input_ids_T nor input_embeds") as caught:
        model(None, positions, attend)
    assert caught.value.field == "input_ids_T"


def test_int32_inputs_and_no_tokens(model):
    ids, attend = torch.arange(6), causal_attend(2, 3)
    narrow = model(ids.int(), ids.int(), attend)
    assert torch.equal(narrow, model(ids, ids, attend))
    empty = model(ids[:0], ids[:0], causal_attend(0, 3))
    assert model.logits(empty).shape == (0, 96)


def test_nothing_depends_on_values(model):
    """Meta tensors have no values: host synchronisations and data-dependent shapes raise."""
    ids = torch.zeros(6, dtype=torch.long, device="meta")
    hidden = model.to("meta")(ids, ids, causal_attend(2, 3))
    assert model.logits(hidden).shape == (6, 96)


def test_forward_keeps_no_state(model):
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    model(torch.arange(3), torch.tensor([500, 3, 100_000]), causal_attend(1, 3))
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    assert list(buffers) == ["model.rotary_emb.inv_freq"]
    assert not any("inv_freq" in name for name in model.state_dict())


def test_rotary_frequencies_survive_casts_and_moves(model):
    rope = model.model.rotary_emb
    before, address = rope.inv_freq.clone(), rope.inv_freq.data_ptr()
    model.to(torch.bfloat16).float().cpu()
    assert rope.inv_freq.data_ptr() == address
    assert torch.equal(rope.inv_freq, before)
    model.to("meta").to_empty(device="cpu")
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, before)


def test_loading_chooses_the_dtype_and_needs_no_gradients(model, tmp_path):
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(str(tmp_path), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name


def test_initialise_damps_what_adds_to_the_residual():
    torch.manual_seed(0)
    model = LlamaModel(CONFIG)
    initialise(model, 8)
    layer = model.model.layers[0]
    assert layer.mlp.gate_up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
