"""The DFLASH head: its computation beside transformers', and its folders."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.folders import save_draft_head
from transformers import Qwen3Config

from causal_attention import run_head
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.load import head_algorithm, load_head
from graphkit.models.running import attending

BLOCK, MASK = 4, 90


@pytest.fixture
def make_head(target):
    """``make_head(...)``: a random head of two layers over the first layers of the target."""

    def make(**options):
        torch.manual_seed(6)
        config = Qwen3Config(
            vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=128, )  # fmt: skip
        usual = {"target_layer_ids": (0,), "block_size": BLOCK, "mask_token_id": MASK}
        head = DFlashHead(config, target, **(usual | options))
        for name, parameter in head.named_parameters():
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
        return head.eval().requires_grad_(False)

    return make


def run(head, features, block):
    """Return the hidden states of a block behind the context of some features."""
    length = len(features)
    positions = torch.arange(length + len(block))
    context = head.context_heads(head.encoder(features), positions[:length])

    def attend(layer, query, *rows):
        key, value = (
            torch.cat(both).transpose(0, 1) for both in zip(context[layer], rows, strict=True)
        )
        query = query.transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(0, 1)

    return run_head(head, block, positions[length:], attend)


@pytest.fixture
def block():
    return torch.tensor([7, MASK, MASK, MASK])


@pytest.fixture
def features(target):
    return torch.randn(9, target.hidden_size, generator=torch.Generator().manual_seed(1))


def test_blocks_are_those_of_transformers(make_head, target, features, block, tmp_path):
    """Two rounds: the second adds context, and the first block leaves the cache."""
    transformers = pytest.importorskip("transformers")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this version of transformers has no DFLASH head")
    head = make_head()
    save_draft_head(head, tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    cache = cache_utils.DFlashCache(config=model.config)
    cache.activate_past_recording()
    noise = target.embedding(block)[None]
    for begin, end in ((0, 5), (5, 9)):
        if begin:
            cache.crop(-BLOCK)
        cache.set_previous_accepted_tokens(end - begin)
        with torch.no_grad():
            expected = model(
                noise_embeds=noise,
                context_hidden_states=features[None, begin:end],
                position_ids=torch.arange(begin, end + BLOCK)[None],
                past_key_values=cache,
            ).last_hidden_state[0]
        got = run(head, features[:end], block)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_those_of_the_whole_projection(make_head, features):
    head = make_head()
    seen, positions = [], torch.arange(9)

    def attend(call):
        seen.append([part[0].transpose(0, 1) for part in (call.key, call.value)])
        return call.query.transpose(1, 2)

    with attending(attend, positions):
        for layer in head.layers:
            rotation = head.rotary_emb(features[None], positions[None])
            layer.self_attn(features[None], rotation, None)
    assert len(seen) == 2
    for is_prepared in (False, True):
        if is_prepared:
            head.prepare()
        with torch.no_grad():
            torch.testing.assert_close(head.context_heads(features, positions), [*map(tuple, seen)])


def test_a_saved_head_is_loaded_again(make_head, target, features, block, tmp_path):
    head = make_head()
    save_draft_head(head, tmp_path)
    assert head_algorithm(tmp_path) == "DFLASH"
    loaded = load_head("DFLASH", tmp_path, target)
    assert loaded.target_layer_ids == (0,)
    assert loaded.aux_layers == (1,)
    assert (loaded.block_size, loaded.mask_token_id) == (BLOCK, MASK)
    assert torch.equal(run(loaded, features, block), run(head, features, block))


def test_the_layout_of_the_authors_is_loaded(make_head, target, features, block, tmp_path):
    head = make_head()
    save_draft_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {name: config.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    config |= {
        "model_type": "qwen3",
        "dflash_config": nested,
        "architectures": ["DFlashDraftModel"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
    }
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {names.get(name, name): each for name, each in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    loaded = load_head("DFLASH", tmp_path, target)
    assert torch.equal(run(loaded, features, block), run(head, features, block))


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"target_layer_ids": (0, 1)}, "target_layer_ids", "all but the target's last"),
        ({"target_layer_ids": ()}, "target_layer_ids", "at least one"),
        ({"mask_token_id": 96}, "mask_token_id", "tokens 0 to 95"),
        ({"block_size": 1}, "block_size", "must be an int >= 2"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(make_head, options, field, text):
    with pytest.raises(ConfigError, match=text) as caught:
        make_head(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be an int"),
        ({"layer_types": None}, "sliding_window must be an int"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
        ({"target_layer_ids": "all"}, "target_layer_ids must be a list of ints"),
        ({"target_layer_ids": [5]}, "all but the target's last"),
        ({"mask_token_id": None}, "mask_token_id must be an int"),
        ({"block_size": 0}, "block_size must be an int >= 2"),
        ({"dflash_config": 3}, "dflash_config must be an object"),
        ({"hidden_size": 32}, "hidden_size 32"),
    ],
)
def test_malformed_folders_are_refused(make_head, target, tmp_path, changes, text):
    save_draft_head(make_head(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=text):
        load_head("DFLASH", tmp_path, target)
