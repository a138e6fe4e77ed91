"""Shapes of published models with random weights."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from graphkit.errors import ConfigError
from graphkit.models import random_model, shapes
from graphkit.models.experts import experts_of
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.models.shapes import SHAPES, shape_config


def on_meta(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config(shape))


@pytest.mark.parametrize(
    ("shape", "parameters"), [("llama-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)]
)
def test_a_shape_has_the_parameters_of_its_model(shape, parameters):
    assert sum(weight.numel() for weight in on_meta(shape).parameters()) == parameters


def test_weights_are_normal_and_norms_are_one():
    model = random_model("tiny", "eagle", device="cpu")
    assert (model.algorithm, model.dtype) == ("EAGLE", torch.bfloat16)
    assert isinstance(model.draft.module, EagleHead)
    for module in (model.model, model.draft.module):
        for name, weight in module.named_parameters():
            assert not weight.requires_grad
            if "norm" in name:
                assert (weight == 1).all()
            else:
                assert 0.018 < weight.float().std() < 0.022
                assert abs(weight.float().mean()) < 0.002


def test_the_eagle_3_head_drafts_a_quarter_of_a_small_vocabulary():
    draft = random_model("tiny", "EAGLE3", device="cpu").draft
    assert isinstance(draft.module, Eagle3Head)
    assert draft.token_map.tolist() == list(range(0, 256, 4))
    assert draft.module.lm_head.weight.shape == (64, 32)
    assert 0.018 < draft.module.fc.weight.float().std() < 0.022


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-8b"])
def test_the_eagle_3_head_of_a_shape_is_as_published_ones(shape):
    model = on_meta(shape)
    with torch.device("meta"):
        head = shapes._draft_head("EAGLE3", model)
    layers, size = SHAPES[shape]["num_hidden_layers"], SHAPES[shape]["hidden_size"]
    assert head.aux_layers == (2, layers // 2, layers - 3)
    assert head.fc.weight.shape == (size, 3 * size)
    assert head.lm_head.weight.shape == (32_000, size)
    assert not [name for name, _ in head.named_parameters() if "q_norm" in name]


def test_weights_depend_on_the_seed_alone():
    state = torch.random.get_rng_state()
    first, same = (random_model("tiny", "NONE", device="cpu").head.weight for _ in range(2))
    other = random_model("tiny", "NONE", device="cpu", seed=1).head.weight
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_file_of_settings_is_a_shape(tmp_path):
    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = random_model(tmp_path / "config.json", "EAGLE", device="cpu", dtype=torch.float32)
    assert experts_of(model.model)
    assert model.draft.module.config.hidden_size == 32
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no model"}))
    with pytest.raises(ConfigError, match="cannot be read by transformers") as caught:
        random_model(tmp_path, device="cpu")
    assert caught.value.field == "shape"


def test_shapes_are_quantised():
    model = random_model("tiny", "EAGLE3", device="cpu", quantize="int4")
    assert isinstance(model.draft.module.midlayer.self_attn.q_proj, QuantizedLinear)
    plain = random_model("tiny", "EAGLE3", device="cpu")
    one, other = (each.head.weight for each in (model, plain))
    assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "MULTI_LAYER_EAGLE", "EAGLE4"])
def test_an_algorithm_without_a_random_draft_model_is_refused(algorithm):
    with pytest.raises(ConfigError, match=rf"{algorithm} needs a draft model of its kind"):
        random_model("tiny", algorithm, device="cpu")


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match="unknown shape 'huge': shapes are llama-8b, qwen3-8b"):
        random_model("huge", device="cpu")
    for shape in (3, ["tiny"], None):
        with pytest.raises(ConfigError, match="shape must be a name or a path"):
            random_model(shape, device="cpu")
